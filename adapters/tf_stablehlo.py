"""StableHLO programs of one custom call, as text, for TensorFlow's XlaCallModule.

Sizes may be open: a dimension of an argument that is not known is `?`, and a dimension of a result may be that of an
argument.  XLA compiles for known sizes all the same: TensorFlow fills in those of each call and derives the others from
the operands of the custom call that hold the results' shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

#: A dimension: its size; or (position, axis) of the argument whose dimension it is; or, of an argument, None.
Extent = int | tuple[int, int] | None
#: (element type by CKI's name, dimensions).
Tensor = tuple[str, Sequence[Extent]]

_ELEMENTS = {
    "f64": "f64", "f32": "f32", "f16": "f16", "bf16": "bf16", "e4m3": "f8E4M3FN", "e5m2": "f8E5M2", "i64": "i64",
    "i32": "i32", "i16": "i16", "i8": "i8", "u64": "ui64", "u32": "ui32", "u16": "ui16", "u8": "ui8", "bool": "i1",
}  # fmt: skip


def module(
    target: str,
    arguments: Sequence[Tensor],
    results: Sequence[Tensor],
    aliases: Sequence[tuple[int, int]],
    text: str,
) -> str:
    """A module of one custom call of `target`, whose one attribute is `text`.

    aliases: (result, argument) pairs that share memory.
    """
    taken, given = [_type(*argument) for argument in arguments], [_type(*result) for result in results]
    names = [f"%arg{index}" for index in range(len(arguments))]
    signature = ", ".join(f"{name}: {kind}" for name, kind in zip(names, taken))
    is_open = any(not isinstance(extent, int) for _, shape in [*arguments, *results] for extent in shape)
    lines: list[str] = []
    operands, kinds = list(names), list(taken)
    layouts = [_layout(len(shape)) for _, shape in arguments]
    options = ["api_version = 4 : i32", f'backend_config = {{call = "{_escaped(text)}"}}']
    if is_open:
        positions = []
        for index, (_, shape) in enumerate(results):
            lines += _shape_of(f"%shape{index}", shape, taken)
            positions.append(str(len(operands)))
            operands.append(f"%shape{index}")
            kinds.append(f"tensor<{len(shape)}xi32>")
            layouts.append(_layout(1))
        listed = f"dense<[{', '.join(positions)}]> : tensor<{len(positions)}xi64>"
        options.append(f"indices_of_shape_operands = {listed}")
    options.append(f"operand_layouts = [{', '.join(layouts)}]")
    options.append(f"result_layouts = [{', '.join(_layout(len(shape)) for _, shape in results)}]")
    many = len(results) > 1
    if aliases:
        listed = ", ".join(
            f"#stablehlo.output_operand_alias<output_tuple_indices = [{result if many else ''}], "
            f"operand_index = {argument}, operand_tuple_indices = []>"
            for result, argument in aliases
        )
        options.append(f"output_operand_aliases = [{listed}]")
    returned = ", ".join(f"%0#{index}" for index in range(len(results))) if many else "%0"
    shown = ", ".join(given)
    lines.append(
        f"%0{f':{len(results)}' if many else ''} = stablehlo.custom_call @{target}({', '.join(operands)}) "
        f"{{{', '.join(options)}}} : ({', '.join(kinds)}) -> {f'({shown})' if many else shown}"
    )
    body = "".join(f"    {line}\n" for line in [*lines, f"return {returned} : {shown}"])
    mark = (
        "attributes {jax.uses_shape_polymorphism = true} " if is_open else ""
    )  # TensorFlow's sign for open sizes
    return f"module @cki {mark}{{\n  func.func public @main({signature}) -> ({shown}) {{\n{body}  }}\n}}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\5C").replace('"', "\\22")


def _type(element: str, shape: Sequence[Extent]) -> str:
    extents = "".join(f"{extent if isinstance(extent, int) else '?'}x" for extent in shape)
    return f"tensor<{extents}{_ELEMENTS[element]}>"


def _layout(rank: int) -> str:
    """Row-major, whatever XLA would choose."""
    if not rank:
        return "dense<> : tensor<0xindex>"
    return f"dense<[{', '.join(str(axis) for axis in reversed(range(rank)))}]> : tensor<{rank}xindex>"


def _shape_of(name: str, shape: Sequence[Extent], argument_types: Sequence[str]) -> list[str]:
    """Operations that compute a result's shape, a vector of i32."""
    lines, parts = [], []
    for axis, extent in enumerate(shape):
        part = f"{name}_{axis}"
        if isinstance(extent, tuple):
            argument, of_axis = extent
            lines.append(
                f"{part}_size = stablehlo.get_dimension_size %arg{argument}, dim = {of_axis} : "
                f"({argument_types[argument]}) -> tensor<i32>"
            )
            lines.append(f"{part} = stablehlo.reshape {part}_size : (tensor<i32>) -> tensor<1xi32>")
        else:
            lines.append(f"{part} = stablehlo.constant dense<{extent}> : tensor<1xi32>")
        parts.append(part)
    if not parts:
        return [f"{name} = stablehlo.constant dense<> : tensor<0xi32>"]
    kinds = ", ".join("tensor<1xi32>" for _ in parts)
    lines.append(
        f"{name} = stablehlo.concatenate {', '.join(parts)}, dim = 0 : ({kinds}) -> tensor<{len(parts)}xi32>"
    )
    return lines
