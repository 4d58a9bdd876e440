"""Constructors that a pickle's names stand for: each makes one harmless value of its arguments, or refuses them."""

from __future__ import annotations

from typing import Any

from onepolicy.formats.inert import Context, Known, Opaque, hashable, shown
from onepolicy.formats.storages import Array, DType, Jagged, Storage, Tensor, array_from_buffer
from onepolicy.formats.storages import scalar as number_of


def itself(context: Context, args: tuple[Any, ...]) -> Any:
    """A name that stands for itself: a class given as an argument. Calling it makes nothing."""
    raise context.fail(f"damaged pickle: a type that makes nothing is called with {len(args)} arguments")


def mapping(context: Context, args: tuple[Any, ...]) -> dict[Any, Any]:
    pairs: Any = args[0] if args and not isinstance(args[0], Known) else ()
    if len(args) > 2 or not isinstance(pairs, (list, tuple, dict)):
        raise context.fail("damaged pickle: a dict is made of something that is no list of pairs")
    made: dict[Any, Any] = {}
    context.spend(len(pairs))
    for pair in list(pairs.items()) if isinstance(pairs, dict) else pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not hashable(pair[0]):
            raise context.fail("damaged pickle: a dict is made of something that is no list of pairs")
        made[pair[0]] = pair[1]
    return made


def elements(context: Context, args: tuple[Any, ...]) -> list[Any]:
    given: Any = args[0] if args else []
    if len(args) > 2 or not isinstance(given, (list, tuple, set, frozenset)):
        raise context.fail("damaged pickle: a collection is made of something that is no list")
    context.spend(len(given))
    return list(given)


def made_set(context: Context, args: tuple[Any, ...]) -> set[Any]:
    given = elements(context, args)
    if not all(hashable(x) for x in given):
        raise context.fail("damaged pickle: a set of elements that cannot be in a set")
    return set(given)


def encoded(context: Context, args: tuple[Any, ...]) -> bytes:
    """How protocol 2 writes bytes: text, to be encoded."""
    if not (1 <= len(args) <= 2 and isinstance(args[0], str)) or args[1:] not in ((), ("latin1",), ("latin-1",)):
        raise context.fail("damaged pickle: bytes are written in an encoding that is not latin-1")
    context.spend(len(args[0]))
    return args[0].encode("latin-1")


def made_bytes(context: Context, args: tuple[Any, ...]) -> bytes:
    """`bytearray`, too. Of a number it would make that many zeros: only of bytes or text."""
    if not args:
        return b""
    if len(args) == 1 and isinstance(args[0], bytes):
        return args[0]
    return encoded(context, args)


def made_complex(context: Context, args: tuple[Any, ...]) -> complex:
    if len(args) != 2 or not all(type(x) in (int, float) for x in args):
        raise context.fail("damaged pickle: a complex number is made of something that is no number")
    return complex(args[0], args[1])


def made_range(context: Context, args: tuple[Any, ...]) -> range:
    if not 1 <= len(args) <= 3 or not all(type(x) is int for x in args) or args[2:] == (0,):
        raise context.fail("damaged pickle: a range is made of something that is no number")
    return range(*args)


def reconstructed(context: Context, args: tuple[Any, ...]) -> Any:
    """How protocols 0 and 1 make an object of a class: `(class, base, state of the base)`."""
    if len(args) != 3 or not isinstance(args[0], Known):
        raise context.fail("damaged pickle: an object of something that is no class")
    base: Any = args[2]
    made = args[0].make(context, ())
    if isinstance(made, Opaque) and isinstance(base, dict):
        context.spend(len(base))
        made.items.update(base)
    return made


def new_object(context: Context, args: tuple[Any, ...]) -> Any:
    if not args or not isinstance(args[0], Known):
        raise context.fail("damaged pickle: an object of something that is no class")
    return args[0].make(context, tuple(args[1:]))


def made_tuple(context: Context, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(elements(context, args))


def as_text(context: Context, args: tuple[Any, ...]) -> str:
    """A device, a layout: kept as text."""
    return ":".join(str(x)[:40] for x in args if isinstance(x, (str, int)))


def nested_bytes(context: Context, args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or not isinstance(args[0], bytes) or context.load_bytes is None:
        raise context.fail("damaged pickle: a storage is made of something that is no bytes")
    return context.load_bytes(args[0])


def tensor(context: Context, args: tuple[Any, ...]) -> Tensor:
    """`(storage, offset, size, stride, requires_grad, hooks[, metadata])`; older ones end after the stride."""
    if not 4 <= len(args) <= 7 or (len(args) == 7 and args[6]):
        raise context.fail("damaged pickle, or a conjugated tensor: a tensor's arguments are not those of torch")
    return _tensor_of(context, args[:4], None)


def tensor_v3(context: Context, args: tuple[Any, ...]) -> Tensor:
    if not 7 <= len(args) <= 8 or not isinstance(args[6], DType) or (len(args) == 8 and args[7]):
        raise context.fail("damaged pickle: a tensor's arguments are not those of torch")
    return _tensor_of(context, args[:4], args[6])


def _tensor_of(context: Context, args: tuple[Any, ...], dtype: DType | None) -> Tensor:
    storage, offset, size, stride = args
    if not isinstance(storage, Storage):
        raise context.fail("damaged pickle: a tensor is made of something that is no storage")
    if not (isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride) <= 32):
        raise context.fail("damaged pickle: a tensor's size and stride are not of one length")
    if not all(type(x) is int and x >= 0 for x in (offset, *size, *stride)):
        raise context.fail("damaged pickle: a tensor's offset, size or stride is no number of at least 0")
    tensor = Tensor(context.place, context.size, storage, offset, size, stride, dtype)
    context.tensors.append(tensor)
    return tensor


def first_tensor(context: Context, args: tuple[Any, ...]) -> Tensor:
    """A parameter is its tensor."""
    if not args or not isinstance(args[0], Tensor):
        raise context.fail("damaged pickle: a parameter of something that is no tensor")
    return args[0]


def tensor_of_type(context: Context, args: tuple[Any, ...]) -> Any:
    """A tensor with attributes, or of a subclass: `(function, class, its arguments, attributes)`."""
    if len(args) != 4 or not isinstance(args[0], Known) or args[0].make not in _REBUILDS:
        raise context.refuse("a tensor is made by something that makes no tensors")
    if not isinstance(args[2], tuple):
        raise context.fail("damaged pickle: a tensor's arguments are not those of torch")
    return args[0].make(context, args[2])


def jagged(context: Context, args: tuple[Any, ...]) -> Jagged:
    """`{values, offsets, lengths, ...}`: rows of unequal length behind each other."""
    given: Any = args[0] if len(args) == 1 else None
    if not isinstance(given, dict):
        raise context.fail("damaged pickle: a nested tensor without its values")
    return Jagged(context.place, given.get("values"), given.get("offsets"), given.get("lengths"))


def strided_nested(context: Context, args: tuple[Any, ...]) -> Jagged:
    if len(args) != 4:
        raise context.fail("damaged pickle: a nested tensor without its values")
    return Jagged(context.place, args[0], None, args[1], starts=args[3])


_REBUILDS = (tensor, tensor_v3, jagged, first_tensor)


def reconstruct(context: Context, args: tuple[Any, ...]) -> Array:
    if len(args) != 3 or not isinstance(args[0], Known) or args[0].name != "ndarray":
        raise context.fail("damaged pickle: an array of something that is no array type")
    return Array(context.place)


def dtype_of(context: Context, args: tuple[Any, ...]) -> DType:
    name: Any = args[0] if args else None
    if isinstance(name, bytes):
        name = name.decode("latin-1")
    if not isinstance(name, str) or DType.of_numpy(name) is None:
        raise context.fail(f"an array of the type {shown(str(name))}, which is not read")
    return DType(name, "<")


def from_buffer(context: Context, args: tuple[Any, ...]) -> Array:
    if len(args) != 4:
        raise context.fail("damaged pickle: an array's arguments are not those of numpy")
    return array_from_buffer(context.place, *args)


def scalar(context: Context, args: tuple[Any, ...]) -> Any:
    if len(args) != 2:
        raise context.fail("damaged pickle: a number's arguments are not those of numpy")
    return number_of(context.place, args[0], args[1])
