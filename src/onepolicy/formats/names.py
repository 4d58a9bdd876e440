"""What a pickle may name: exact (module, name) pairs, and what stands for each. Anything else is refused.

What a pickle names is never imported. To read one more class of a framework, add it to `_OPAQUE`: its arguments and its
state are kept, nothing of it runs.
"""

from __future__ import annotations

from typing import Any

from onepolicy.formats import constructors as make
from onepolicy.formats.inert import Context, Known, Make, Opaque, shown
from onepolicy.formats.storages import DType

_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}


def find(context: Context, module: str, name: str) -> Any:
    """What stands for the name: a `Known`, an element type, a type of storages.

    Errors: `ContentError` for a pair that is not in the table.
    """
    module = _PYTHON_2.get(module, module)
    known = NAMES.get((module, name))
    if known is None:
        raise context.refuse(f"the pickle names {shown(module)}.{shown(name)}, which is on no list of inert types")
    return DType(known.name) if isinstance(known, DType) else known  # a pickle may set its byte order


def _attribute(context: Context, args: tuple[Any, ...]) -> Any:
    """How protocol 2 names a class in a class (`Sample.Status`): a look into the same table, nothing else."""
    if len(args) != 2 or not isinstance(args[0], Known) or not isinstance(args[1], str):
        raise context.refuse("the pickle asks for an attribute (getattr)")
    return find(context, args[0].module, f"{args[0].name}.{args[1]}")


_CALLS: dict[str, Make] = {
    "collections.OrderedDict": make.mapping,
    "collections.defaultdict": make.mapping,
    "collections.Counter": make.mapping,
    "collections.deque": make.elements,
    "builtins.dict": make.mapping,
    "builtins.list": make.elements,
    "builtins.tuple": make.made_tuple,
    "builtins.set": make.made_set,
    "builtins.frozenset": make.made_set,
    "builtins.bytes": make.made_bytes,
    "builtins.bytearray": make.made_bytes,
    "builtins.complex": make.made_complex,
    "builtins.range": make.made_range,
    "builtins.xrange": make.made_range,
    "builtins.getattr": _attribute,
    "builtins.object": make.itself,
    "builtins.int": make.itself,
    "builtins.float": make.itself,
    "builtins.str": make.itself,
    "builtins.bool": make.itself,
    "_codecs.encode": make.encoded,
    "copyreg._reconstructor": make.reconstructed,
    "copyreg.__newobj__": make.new_object,
    "torch.Size": make.made_tuple,
    "torch.device": make.as_text,
    "torch.Tensor": make.itself,
    "torch.nn.parameter.Parameter": make.itself,
    "torch.serialization._get_layout": make.as_text,
    "torch.storage._load_from_bytes": make.nested_bytes,
    "torch._utils._rebuild_tensor": make.tensor,
    "torch._utils._rebuild_tensor_v2": make.tensor,
    "torch._utils._rebuild_tensor_v3": make.tensor_v3,
    "torch._utils._rebuild_parameter": make.first_tensor,
    "torch._utils._rebuild_parameter_with_state": make.first_tensor,
    "torch._utils._rebuild_nested_tensor": make.strided_nested,
    "torch._tensor._rebuild_from_type_v2": make.tensor_of_type,
    "torch.nested._internal.nested_tensor.NestedTensor": make.itself,
    "torch.nested._internal.nested_tensor._rebuild_njt": make.jagged,
    "tensordict.memmap.MemoryMappedTensor": make.itself,
    "numpy.ndarray": make.itself,
    "numpy.dtype": make.dtype_of,
    **{
        f"numpy.{core}.{name}": call
        for core in ("core", "_core")
        for name, call in (
            ("multiarray._reconstruct", make.reconstruct),
            ("multiarray.scalar", make.scalar),
            ("numeric._frombuffer", make.from_buffer),
        )
    },
}

#: Classes and functions of which only the arguments and the state are kept: `Opaque`.
_OPAQUE: dict[str, tuple[str, ...]] = {
    "verl.protocol": ("DataProto", "DataProtoItem"),
    "roll.distributed.scheduler.protocol": ("DataProto", "DataProtoItem"),
    "skyrl.backends.skyrl_train.training_batch": (
        "TensorBatch",
        "TrainingInputBatch",
        "TrainingOutputBatch",
        "TensorList",
        "_rebuild_tensor_batch",
    ),
    "skyrl_train.training_batch": (
        "TensorBatch",
        "TrainingInputBatch",
        "TrainingOutputBatch",
        "TensorList",
        "_rebuild_tensor_batch",
    ),
    "slime.utils.types": ("Sample", "Sample.Status", "Sample.SpecInfo", "Sample.PrefixCacheInfo"),
    "miles.utils.types": ("Sample", "Sample.Status", "Sample.SpecInfo", "Sample.PrefixCacheInfo"),
    "tensordict": ("TensorDict",),
    "tensordict._td": ("TensorDict",),
    "tensordict.tensordict": ("TensorDict",),
    "tensordict._lazy": ("LazyStackedTensorDict",),
    "tensordict.tensorclass": ("NonTensorData", "NonTensorStack"),
    "tensordict.utils": ("_LockedSchema", "_StringOnlyDict"),
    "tensordict._reductions": (
        "_make_td",
        "_rebuild_tensordict_files",
        "_rebuild_tensordict_files_shared",
        "_rebuild_tensordict_files_consolidated",
    ),
    "torch._dynamo.decorators": ("_DimRange",),
    "_io": ("BytesIO",),
    "datetime": ("datetime", "date", "timedelta", "timezone"),
    "uuid": ("UUID",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "types": ("SimpleNamespace",),
    "argparse": ("Namespace",),
}


def _opaque(module: str, name: str) -> Known:
    return Known(module, name, lambda context, args: Opaque(module, name, args))


def _split(path: str) -> tuple[str, str]:
    module, _, name = path.rpartition(".")
    return module, name


#: (module, name) -> what stands for it.
NAMES: dict[tuple[str, str], Any] = {
    **{_split(path): Known(*_split(path), make) for path, make in _CALLS.items()},
    **{(module, name): _opaque(module, name) for module, names in _OPAQUE.items() for name in names},
    **DType.torch_names(),
}
