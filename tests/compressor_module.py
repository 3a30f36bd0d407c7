"""The compressor as a layer: two projections, the pooling by dispatch or by plain PyTorch, and a norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from csa_gate.fused import maybe_compress_thd_fused


class Compressor(nn.Module):
    """Pools every `ratio` tokens of a packed batch, (total_tokens, hidden) bf16, into a row, (total_comp, head_dim).

    `fused` tells after a call whether the dispatch engaged.
    """

    def __init__(self, hidden: int, head_dim: int, ratio: int, coff: int, seed: int = 0) -> None:
        super().__init__()
        self.head_dim, self.ratio, self.coff = head_dim, ratio, coff
        self.fused = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.values = nn.Linear(hidden, coff * head_dim, bias=False, dtype=torch.bfloat16)
            self.gate = nn.Linear(hidden, coff * head_dim, bias=False, dtype=torch.bfloat16)
            self.ape = nn.Parameter(torch.randn(ratio, coff * head_dim))
        self.norm = nn.RMSNorm(head_dim, dtype=torch.bfloat16)

    def forward(self, x: Tensor, cu_seqlens: Tensor, cu_seqlens_comp: Tensor, total_comp: int) -> Tensor:
        tensors = (self.values(x), self.gate(x), self.ape, cu_seqlens, cu_seqlens_comp)
        pooled = maybe_compress_thd_fused(*tensors, total_comp, self.ratio, self.head_dim, self.coff)
        self.fused = pooled is not None
        if pooled is None:
            pooled = eager_pool(*tensors, total_comp, self.ratio, self.coff)
        normed: Tensor = self.norm(pooled)
        return normed


def eager_pool(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    total_comp: int,
    ratio: int,
    coff: int,
) -> Tensor:
    """What a model without fused kernels does: gather, softmax and sum in fp32, one rounding to bf16 at the end."""
    rows = torch.arange(total_comp, device=kv.device)
    segment = torch.searchsorted(cu_seqlens_comp[1:].long(), rows, right=True).clamp(max=len(cu_seqlens) - 2)
    block = rows - cu_seqlens_comp[segment]
    real = rows < cu_seqlens_comp[-1]
    first = ~real | (block == 0)
    own = torch.where(real, cu_seqlens[segment] + block * ratio, 0)[:, None] + torch.arange(ratio, device=kv.device)
    values, logits = kv[own].float(), score[own].float() + ape
    if coff == 2:
        head_dim = kv.shape[1] // 2
        previous = (own - ratio).clamp(min=0)
        hidden = first[:, None, None]
        overlap = kv[previous].float().masked_fill(hidden, 0.0)
        overlap_logits = (score[previous].float() + ape).masked_fill(hidden, -torch.inf)
        values = torch.cat((overlap[..., :head_dim], values[..., head_dim:]), dim=1)
        logits = torch.cat((overlap_logits[..., :head_dim], logits[..., head_dim:]), dim=1)
    return (values * torch.softmax(logits, dim=1)).sum(dim=1).to(torch.bfloat16)
