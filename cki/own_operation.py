"""A kernel of `cki.load` as an operation, by a rule in Python that gives its outputs and its launch.

    def rule(x, *, factor):
        n = x.size
        return cki.LaunchRule(outputs={"y": (x.shape, x.dtype)}, grid=-(-n // 256), block=256, numbers={"n": n})

    scale = cki.load(source).operation(rule)      # scale(const float* x, float* y, float factor, int n)
    y = scale(x, factor=2.0)

The operation is described like CKI's own (`OpSpec`), so all that is made from that holds for it: outputs from the
caller's framework, plans that are remembered, torch.compile, jax.jit and tf.function.

Of the kernel's parameters, pointers to const are the inputs, by name; other pointers are outputs, which the rule names;
numbers are keyword arguments, unless the rule gives them.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cki import dtypes
from cki.arguments import NUMBERS
from cki.device import DeviceInfo
from cki.dtypes import DType
from cki.errors import CkiError, InvalidArgumentError, InvalidTypeError
from cki.kernel import KernelSpec
from cki.load_arguments import TensorMap, map_argument, number_word
from cki.loader import shared_bytes, triple
from cki.operand import Operand
from cki.ops.call import call
from cki.ops.spec import Attribute, Input, OpSpec, OutputSpec, Problem
from cki.ops.table import public_specs
from cki.plan import ArgumentValue, Plan, Step
from cki.signature import Parameter
from cki.tensor import DeviceId, TensorView


@dataclass(frozen=True)
class LaunchRule:
    """What a rule returns for tensors of certain shapes.

    outputs: (shape, dtype) by the name of the pointer parameter, in the order in which they are returned; dtype as
    `cki.dtypes` or NumPy has it, or its name.  grid, cluster: blocks, and block: threads, an int or up to three.
    numbers: of parameters that follow from shapes; for a TensorMap parameter a `cki.TensorMap` of an input.  smem:
    dynamic shared memory in bytes.  strided: the kernel reads inputs by the strides that its rule tells it; else all
    are row-major without gaps, and others are refused.
    """

    outputs: Mapping[str, tuple[Sequence[int], Any]]
    grid: int | Sequence[int]
    block: int | Sequence[int]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    smem: int = 0
    cluster: int | Sequence[int] = 1
    cooperative: bool = False
    strided: bool = False


#: Of all operations, in the order in which they were made.
made: list[OpSpec] = []
#: (inputs by position, as `cki.operand.Operand`s with shape, strides, dtype and size; numbers by name) -> LaunchRule.
Rule = Callable[..., LaunchRule]


@dataclass(frozen=True)
class OwnSpec(OpSpec):
    """The description of a user's operation: what frameworks make programs of, like those of the table.

    importable_as: "package.module:name" of the operation, where it has one.
    """

    importable_as: str | None = None


class OwnOperation:
    """A user's kernel that is called like one of CKI's operations.  Made by `Kernel.operation`."""

    def __init__(
        self,
        kernel: KernelSpec,
        parameters: Sequence[Parameter],
        rule: Rule,
        importable_as: str | None = None,
    ) -> None:
        """Raises InvalidArgumentError when the parameters have no names, or no pointer is an input or an output."""
        if not callable(rule):
            raise InvalidTypeError(
                f"{kernel.entry}: the rule is {rule!r}", hint="a function that returns a LaunchRule"
            )
        self._kernel, self._parameters, self._rule = kernel, tuple(parameters), rule
        pointers = [p for p in parameters if p.letter == "P"]
        inputs = [p for p in pointers if p.is_const]
        self._outputs = [p for p in pointers if not p.is_const]
        problems = [f"{p.name} is no name for an argument" for p in parameters if not p.name.isidentifier()]
        if not inputs:
            problems.append("it has no pointer to const, which would be an input")
        if not self._outputs:
            problems.append("it has no other pointer, which would be an output")
        hint = "named parameters, read from the declaration"
        if importable_as is not None and not _is_importable(importable_as):
            problems.append(f"importable_as is {importable_as!r}")
            hint = 'importable_as="package.module:name" of a module that other processes can import'
        if problems:
            raise InvalidArgumentError(f"{kernel.entry} cannot be an operation", problems, hint)
        self._numbers = [p for p in parameters if p.letter in NUMBERS]
        self.spec = OwnSpec(
            name=_unused_name(kernel.entry),
            inputs=tuple(Input(p.name) for p in inputs),
            attributes=tuple(Attribute(p.name, float if p.letter in "fd" else int) for p in self._numbers),
            outputs=tuple(p.name for p in self._outputs),
            check=self._check,
            infer=self._infer,
            plan=self._plan,
            importable_as=importable_as,
        )
        self.__name__ = self.spec.name
        self.__signature__ = self._signature()
        made.append(self.spec)
        operators = sys.modules.get("cki.adapters.torch_ops")
        if operators is not None:
            operators.add(self.spec)

    def __repr__(self) -> str:
        return f"<cki operation {self.__name__}{self.__signature__}>"

    def _signature(self) -> inspect.Signature:
        kind = inspect.Parameter
        names = [kind(item.name, kind.POSITIONAL_OR_KEYWORD) for item in self.spec.inputs]
        named = [kind(item.name, kind.KEYWORD_ONLY, default=None) for item in self.spec.attributes]
        return inspect.Signature([*names, *named])

    def __call__(self, *inputs: Any, stream: Any = None, **named: Any) -> Any:
        """Run it on tensors of any framework.

        inputs: the kernel's pointers to const, in its order or by name.  named: its numbers.  stream: as for CKI's own
        operations.  Returns the one output, or a tuple of all.  Raises InvalidTypeError, InvalidArgumentError or
        DeviceError, before any launch, with everything that is wrong.
        """
        given = list(inputs)
        names = [item.name for item in self.spec.inputs]
        for name in names[len(inputs) :]:
            given.append(named.pop(name, None))
        numbers = tuple([named.pop(item.name, None) for item in self.spec.attributes])
        if named or len(given) > len(names):
            what = f"no argument {', '.join(named)}" if named else f"{len(names)} tensors, not {len(given)}"
            raise InvalidTypeError(f"{self!r} takes {what}")
        return call(self.spec, tuple(given), numbers, (), stream)

    # -----------------------------------------------------------------------------------------------------------------
    # what the OpSpec is made of

    def _apply(self, problem: Problem) -> LaunchRule:
        operands = [problem[item.name] for item in self.spec.inputs]
        given = {
            item.name: problem.attribute(item.name)
            for item in self.spec.attributes
            if problem.attribute(item.name) is not None
        }
        return self._rule(*operands, **given)

    def _check(self, problem: Problem) -> None:
        for parameter in self._parameters:
            if parameter.letter == "P" and parameter.is_const and parameter.element is not None:
                found = problem[parameter.name].dtype
                if found != parameter.element:
                    problem.reject_type(
                        f"{parameter.name} is a {found} tensor, the kernel takes {parameter.element}*"
                    )
        if problem.violations:
            return
        try:
            rule = self._apply(problem)
        except CkiError:
            raise
        except Exception as error:
            shapes = ", ".join(
                f"{item.name} of shape {problem[item.name].shape}" for item in self.spec.inputs
            )
            problem.reject(f"its rule fails for {shapes}: {type(error).__name__}: {error}")
            return
        if not isinstance(rule, LaunchRule):
            problem.reject_type(f"its rule returns {rule!r}", "a cki.LaunchRule")
            return
        for name in ("outputs", "numbers"):
            if not isinstance(getattr(rule, name), Mapping):
                problem.reject_type(f"its rule gives {name} as {getattr(rule, name)!r}", f"{name} by name")
        if problem.violations:
            return
        self._check_rule(problem, rule)

    def _check_rule(self, problem: Problem, rule: LaunchRule) -> None:
        names = [p.name for p in self._outputs]
        if set(rule.outputs) != set(names):
            problem.reject(
                f"its rule gives outputs {', '.join(rule.outputs) or 'none'}", f"outputs {', '.join(names)}"
            )
            return
        for name in names:
            given = rule.outputs[name]
            if not isinstance(given, (tuple, list)) or len(given) != 2 or not _is_shape(given[0]):
                problem.reject(
                    f"its rule gives {name} as {given!r}",
                    "(shape, dtype), a shape of integers from 0 to 2^31 - 1",
                )
        if problem.violations:
            return
        self._check_layouts(problem, rule)
        for parameter in self._outputs:
            dtype = _dtype(rule.outputs[parameter.name][1])
            if parameter.element is not None and dtype != parameter.element:
                problem.reject_type(
                    f"its rule gives {parameter.name} as {dtype}, the kernel writes {parameter.element}*"
                )
        known = {p.name for p in self._parameters if p.letter != "P"}
        for name in rule.numbers.keys() - known:
            problem.reject(f"its rule gives {name}, which is no number of the kernel", f"of {sorted(known)}")
        for parameter in self._parameters:
            if parameter.letter in NUMBERS:
                value = rule.numbers.get(parameter.name, problem.attribute(parameter.name))
                if value is None:
                    problem.reject(
                        f"{parameter.name} is not given", f"{parameter.name}=, or numbers of its rule"
                    )
                elif isinstance(
                    value, (int, float, str, np.generic)
                ):  # else a size that torch traces as a symbol
                    number_word(parameter, value, problem)
            elif parameter.letter == "T" and not isinstance(rule.numbers.get(parameter.name), TensorMap):
                problem.reject_type(
                    f"{parameter.name} is not given by its rule", "a cki.TensorMap of an input"
                )

    def _check_layouts(self, problem: Problem, rule: LaunchRule) -> None:
        """A kernel gets addresses alone: it would read another tensor than the one that was given."""
        if rule.strided:
            return
        for item in self.spec.inputs:
            operand = problem[item.name]
            if not operand.is_contiguous():
                problem.reject(
                    f"{item.name} has shape {operand.shape} and strides {operand.strides}, "
                    "the kernel reads it row-major",
                    "a contiguous copy, or LaunchRule(strided=True) of a rule that tells the kernel the strides",
                )

    def _infer(self, problem: Problem) -> Mapping[str, OutputSpec]:
        found = self._apply(problem).outputs
        return {p.name: OutputSpec(tuple(found[p.name][0]), _dtype(found[p.name][1])) for p in self._outputs}

    def _plan(self, problem: Problem, outputs: Mapping[str, Operand], device: DeviceInfo) -> Plan:
        rule = self._apply(problem)
        arguments = tuple(self._argument(p, problem, outputs, rule) for p in self._parameters)
        kernel = self._kernel
        grid, block, cluster = (triple(name, getattr(rule, name)) for name in ("grid", "block", "cluster"))
        letters = "".join(p.letter for p in self._parameters)
        spec = KernelSpec(kernel.source, kernel.entry, kernel.constants, letters, kernel.archs)
        return Plan((
            Step(spec, grid, block, arguments, shared_bytes(rule.smem), cluster, rule.cooperative,
                 reason="launched by the user's rule"),
        ))  # fmt: skip

    def _argument(
        self, parameter: Parameter, problem: Problem, outputs: Mapping[str, Operand], rule: LaunchRule
    ) -> ArgumentValue:
        if parameter.letter == "P":
            return problem[parameter.name] if parameter.is_const else outputs[parameter.name]
        value = rule.numbers.get(parameter.name)
        if isinstance(value, TensorMap):
            operand = value.tensor
            view = TensorView(0, operand.shape, operand.strides, operand.dtype, DeviceId("cpu"))
            return map_argument(operand.slot, value, view)
        if value is None:
            value = problem.attribute(parameter.name)
        return float(value) if parameter.letter in "fd" else int(value)


def _unused_name(entry: str) -> str:
    """The kernel's name, numbered where another operation has it: programs of frameworks call operations by name."""
    taken = {*public_specs(), *(spec.name for spec in made)}
    names = itertools.chain([entry], (f"{entry}_{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _is_importable(given: Any) -> bool:
    if not isinstance(given, str):
        return False
    module, _, name = given.partition(":")
    return name.isidentifier() and module != "__main__" and all(map(str.isidentifier, module.split(".")))


def _is_shape(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str) and all(map(_is_extent, given))


def _is_extent(given: Any) -> bool:
    if isinstance(given, (int, np.integer)):
        return not isinstance(given, bool) and 0 <= int(given) < 2**31
    return hasattr(given, "node")  # a size that torch traces as a symbol


def _dtype(given: Any) -> DType:
    if isinstance(given, DType):
        return given
    is_numpy = isinstance(given, (type, np.dtype))
    return dtypes.from_numpy(given) if is_numpy else dtypes.from_name(given)
