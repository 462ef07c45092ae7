"""One module a framework: how CKI reads its tensors, allocates with its allocator and finds its stream.

Installed as `cki.adapters`.  A module is imported, and imports its framework, only when `cki.adapter.adapter_of`
meets one of that framework's tensors.  Each has `adapter_for(cls, name)`, which gives the adapter for a tensor
type or raises `InvalidTypeError` for a type of the framework that cannot be used.
"""
