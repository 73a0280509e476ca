"""Products with a weight [out, in], each as its device does it fastest. All take rows [R, in] and
return [R, out] in the rows' precision.

At a few rows a product is bound by reading its weight. On CPUs torch's own kernels do so at 10 GB/s
a core, oneDNN's at 17 if the weight lies in its blocks; and what it computes for a row does not
depend, to the last bit, on the rows beside it.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.config import ConfigError

_FEWEST_ROWS = 4  # of oneDNN's product: 4 rows cost no more than one, and one is added up otherwise
_ROWS_HINT = 16  # for the blocks in which a weight is laid out; they serve any number of rows
_TINY = 1e-12  # a row or weight of zeros is divided by this
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
            x = F.pad(x, (0, 0, 0, _FEWEST_ROWS - count))
        out: Tensor = self._product(x, self.weight, self.bias, "none", [], "")
        return out[:count] if count < _FEWEST_ROWS else out


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
        count, rows = len(x), x.float()
        largest = rows.abs().amax(dim=-1, keepdim=True).clamp_min_(_TINY)
        whole = torch.addcmul(self._offset, rows, self._most / largest).to(torch.int32)
        parts = whole.view(torch.uint8).view(count, -1, 4)  # little-endian: low, high, 0, 0
        parts = parts[..., : 4 if count == 1 else 2]  # 4 rows take less time than 2
        parts = parts.permute(2, 0, 1).flatten(0, 1)
        out = self._product(
            parts, 1.0, 128, self.weight, self.scales, self.zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        out = torch.add(out[:count], out[count : 2 * count], alpha=256).mul_(largest)
        return (out if self.bias is None else out + self.bias).to(x.dtype)


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
