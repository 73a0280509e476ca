"""Products with a weight [out, in], each as its device does it fastest. All take rows [R, in] and
return [R, out] in the rows' precision.

At a few rows a product is bound by reading its weight. On CPUs torch's own kernels do so at 10 GB/s
a core, oneDNN's at 17 if the weight lies in its blocks; and what it computes for a row does not
depend, to the last bit, on the rows beside it.

Of a small target's layer a quarter of the time is its many small steps, with weights of 8 bits
half. Such a step takes some microseconds whatever it does, so what counts is how many there are; a
Python number among the operands is as good as one more.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.config import ConfigError

_FEWEST_ROWS = 4  # of oneDNN's product: 4 rows cost no more than one, and one is added up otherwise
_ROWS_HINT = 16  # for the blocks in which a weight is laid out; they serve any number of rows
_TINY = 1e-12  # a weight of zeros is divided by this
_FREE_ROWS, _ROWS_STEP = 16, 8  # see `_stepped`
_LARGEST = 32512.0  # = 127 * 256


class PlainLinear(nn.Module):
    """Torch's own product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.weight: Tensor
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """oneDNN's product on CPUs, float32 or bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.register_buffer("weight", packed)
        self.register_buffer("bias", bias)
        self.bias: Tensor | None
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        count = len(x)
        if count < _FEWEST_ROWS:
            x = _padded(x, _FEWEST_ROWS)
        elif count > _FREE_ROWS:
            x = _padded(x, _stepped(count))
        out: Tensor = self._product(x, self.weight, self.bias, "none", [], "")
        return out if len(out) == count else out[:count]


class Int8Linear(nn.Module):
    """Weights of 8 bits, one scale for each output; on CPUs.

    A row goes in as two rows of 8 bits, largest / 32512 * (256 * high + low): so 16 bits of it, and
    sums of whole numbers are exact. What is lost is lost in the weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scales = weight.abs().amax(dim=1).clamp_min(_TINY) / 127
        whole = (weight / scales[:, None]).round().to(torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(whole, [_ROWS_HINT, whole.shape[1]])
        self.register_buffer("weight", packed)
        self.register_buffer("scales", scales / _LARGEST)
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int32))
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.bias: Tensor | None
        # Both bytes are counted from 128; conversion to whole numbers cuts off.
        self._offset = torch.tensor(128 * 256 + 128 + 0.5)
        self._most = torch.tensor(_LARGEST)
        self._product = torch.ops.onednn.qlinear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        if len(x) > _FREE_ROWS:
            rows = _padded(rows, _stepped(len(x)))
        count = len(rows)
        largest = rows.abs().amax(dim=-1, keepdim=True)
        # A row of zeros becomes any bytes: what comes of them is multiplied by its largest, 0.
        whole = torch.addcmul(self._offset, rows, self._most / largest).to(torch.int32)
        out = self._product(
            _bytes(whole), 1.0, 128, self.weight, self.scales, self.zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        out = torch.add(out[:count], out[count : 2 * count], alpha=256).mul_(largest)
        out = (out if self.bias is None else out + self.bias).to(x.dtype)
        return out if len(out) == len(x) else out[: len(x)]


def _bytes(whole: Tensor) -> Tensor:
    """Whole numbers [R, in] int32 of 16 bits -> their low bytes, then their high ones [2R, in]. Of
    one row two of zeros more: 4 rows take less time than 2."""
    count, size = whole.shape
    parts = whole.view(torch.uint8)  # little-endian: low, high, 0, 0
    if count == 1:
        return parts.as_strided((4, size), (1, 4))
    return parts.as_strided((2, count, size), (1, 4 * size, 4)).flatten(0, 1)


def _stepped(count: int) -> int:
    """With how many rows a product of many is run. For every number of rows that it meets oneDNN
    keeps kernels, half a MiB for each shape of a weight: of all the numbers that a chunk of a
    prompt may have, that would be hundreds."""
    return -(-count // _ROWS_STEP) * _ROWS_STEP


def _padded(x: Tensor, count: int) -> Tensor:
    """Rows [R, in] -> [count, in]; what is added is of no importance."""
    if len(x) == count:
        return x
    if len(x) == 1:
        return x.expand(count, -1)
    return torch.cat([x, x[:1].expand(count - len(x), -1)])


def make_linear(
    weight: Tensor, bias: Tensor | None = None, weights: str | None = None
) -> nn.Module:
    """The product with a weight as `weights` of the settings wants it."""
    if weights == "int8":
        return Int8Linear(weight, bias)
    return (PackedLinear if _can_pack(weight) else PlainLinear)(weight, bias)


def fused(linears: Iterable[nn.Linear], weights: str | None) -> nn.Module:
    """Several products with the same rows as one; their outputs side by side."""
    parts = list(linears)
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return make_linear(weight, bias, weights)


def replace_linears(module: nn.Module, weights: str | None) -> None:
    """Exchanges each nn.Linear within a module, whose weight is given up."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, fused([child], weights))
        else:
            replace_linears(child, weights)


def check_int8() -> None:
    """Raises ConfigError where products of 8-bit numbers would be wrong: CPUs without such
    instructions add them up in 16 bits, which overflow."""
    try:
        size = 64
        linear = Int8Linear(torch.full((size, size), 1.0))
        found = linear(torch.full((1, size), 127.0))
        right = torch.allclose(found, torch.full_like(found, 127.0 * size))
    except (AttributeError, RuntimeError):
        right = False
    if not right:
        raise ConfigError(
            "weights: int8 needs a CPU with instructions for 8-bit products (VNNI: Intel since Ice "
            "Lake, AMD since Zen 4). Leave `weights` out on this one."
        )


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
