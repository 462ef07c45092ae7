"""The engine: text from the weights of a decoder, on CKI's own kernels from prompt to token."""
