"""Whether each layer of what was unpacked works on this GPU, from the lowest on: ok or FAIL, and what it saw.

INTO/bin/python FOLDER/check.py        # exit code 1 if one fails

"no kernel image": a kernel that was left out. "invalid image" or "invalid resource handle": the driver does not take
pruned code.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def near(what: str, error: float, bound: float) -> str:
    """Raises ``ValueError`` where an error is larger than its bound, or no number."""
    if not error <= bound:
        raise ValueError(f"{what}: {error:.3g} from what it should be, at most {bound:.3g}")
    return f"{error:.3g} from float32"


def torch_loads() -> str:
    import torch

    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return f"{torch.__version__} from {torch.__file__}, {name} {capability}, cuDNN {torch.backends.cudnn.version()}"


def matmul() -> str:
    """[512, 512] by itself in bfloat16, relative to the largest value; a sort and a draw."""
    import torch

    matrix = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    exact = matrix.double() @ matrix.double()
    ordered = torch.sort(exact.float()).values
    if not bool((ordered[:, 1:] >= ordered[:, :-1]).all()):
        raise ValueError("a sort is not sorted")
    if torch.multinomial(torch.rand(8, 100, device="cuda"), 2).shape != (8, 2):
        raise ValueError("a draw has another shape")
    return near("matmul", ((matrix @ matrix).double() - exact).abs().max().item() / exact.abs().max().item(), 0.01)


def flash() -> str:
    """torch's flash attention, [1, 4, 64, 64] and [1, 4, 64, 128], forward and backward."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    said = []
    for width in (64, 128):
        rows = torch.randn(1, 4, 64, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        exact = rows.detach().float().requires_grad_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(rows, rows, rows, is_causal=True)
            out.sum().backward()
        with sdpa_kernel(SDPBackend.MATH):
            scaled_dot_product_attention(exact, exact, exact, is_causal=True).sum().backward()
        assert rows.grad is not None
        assert exact.grad is not None
        error = (rows.grad.float() - exact.grad).norm() / exact.grad.norm()
        said.append(f"{width}: {near('its gradient', error.item(), 0.03)}")
    return ", ".join(said)


def operators() -> str:
    """vLLM's own kernels: the root mean square norm of [8, 896]."""
    import torch
    import vllm._C_stable_libtorch
    import vllm._moe_C_stable_libtorch
    import vllm.cumem_allocator  # noqa: F401

    rows = torch.randn(8, 896, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(rows)
    torch.ops._C.rms_norm(out, rows, torch.ones_like(rows[0]), 1e-6)
    exact = rows.float() * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return near("rms_norm", (out.float() - exact).abs().max().item(), 0.05)


def flash_3() -> str:
    """vLLM's FlashAttention 3: 64 tokens, 14 heads of 64 over 2 heads of keys."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    query = torch.randn(64, 14, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ends = torch.tensor([0, 64], device="cuda", dtype=torch.int32)
    out = flash_attn_varlen_func(query, key, value, max_seqlen_q=64, cu_seqlens_q=ends, max_seqlen_k=64,
                                 cu_seqlens_k=ends, causal=True, fa_version=3)  # fmt: skip

    def by_head(rows: torch.Tensor) -> torch.Tensor:
        return rows.float().transpose(0, 1).repeat_interleave(14 // rows.shape[1], 0)[None]

    q, k, v = map(by_head, (query, key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    return near("attention", (out.float() - exact).abs().max().item(), 0.05)


def nccl() -> str:
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
        ones = torch.ones(4, device="cuda")
        dist.all_reduce(ones)
        dist.destroy_process_group()
    near("a sum over one rank", abs(ones.sum().item() - 4), 0)
    return ".".join(map(str, torch.cuda.nccl.version()))


def triton_compiles() -> str:
    """The softmax that torch.compile makes of [256, 256], which is a kernel of Triton."""
    import torch
    import triton

    rows = torch.randn(256, 256, device="cuda")
    out = torch.compile(lambda x: torch.softmax(x * 2, -1))(rows)
    error = (out - torch.softmax(rows * 2, -1)).abs().max().item()
    return f"Triton {triton.__version__} from {triton.__file__}, {near('softmax', error, 1e-5)}"


def compiled() -> str:
    """A small network's gradient with torch.compile, [64, 256], beside without."""
    import torch

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).cuda()
    rows = torch.randn(64, 256, device="cuda")
    network(rows).sum().backward()
    weights = next(network.parameters())
    assert weights.grad is not None
    exact, weights.grad = weights.grad.clone(), None
    torch.compile(network)(rows).sum().backward()
    return near("its gradient", ((weights.grad - exact).norm() / exact.norm()).item(), 1e-3)


LAYERS: dict[str, Callable[[], str]] = {
    "torch loads": torch_loads,
    "matmul": matmul,
    "flash attention": flash,
    "vLLM's ops": operators,
    "FlashAttention 3": flash_3,
    "NCCL": nccl,
    "Triton": triton_compiles,
    "torch.compile": compiled,
}


def main() -> int:
    failed = 0
    for name, layer in LAYERS.items():
        started = time.monotonic()
        try:
            said = f"ok   {name}: {layer()}"
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a layer, the next ones are tried
            failed += 1
            said = f"FAIL {name}: {type(error).__name__}: {str(error)[:400]}"
        print(f"{said} ({time.monotonic() - started:.1f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
