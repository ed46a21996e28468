"""Run by every rank of a job: drafts of every family over real ranks, against one process that plays them all."""

from __future__ import annotations

import numpy as np

import vpa
from vpa.drafters import FAMILIES, seeded_drafter

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2}


def raised(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    with vpa.comm.from_mpi("mpi", timeout=30) as comm:
        shards = vpa.VocabShard.even(1001, comm.size)
        rng = np.random.default_rng(0)
        hidden = rng.standard_normal((5, 32)).astype(np.float32)
        given = {"token_ids": rng.integers(0, 1001, 5), "positions": np.arange(5)}
        for family in FAMILIES:
            for settings in ({}, {"scale": -0.5, "soft_cap": 2.0, "layout": "pairs"}):
                processor = vpa.LogitsProcessor(comm, **settings)
                mine = seeded_drafter(family, shards, processor, rank=comm.rank, **SIZES)
                played = seeded_drafter(family, shards, vpa.LogitsProcessor(**settings), **SIZES)
                vpa.validate_local_argmax_reduction(mine)
                expected = vpa.draft_tokens(played, hidden, 4, **given)
                for local in (True, False):
                    drafts = vpa.draft_tokens(mine, hidden, 4, use_local_argmax_reduction=local, **given)
                    assert np.array_equal(drafts, expected), (family, settings, local)
        check_errors(comm, mine, hidden, given)
        if comm.rank == 0:
            print(f"agree: {comm.size}")


def check_errors(comm, drafter, hidden, given) -> None:
    """Whatever is wrong on the last rank alone is an error on all, and the next call works."""
    if comm.size == 1:
        return
    odd = comm.rank == comm.size - 1
    processor, head = drafter.logits_processor, drafter.head_of(0)
    other = vpa.LogitsProcessor(comm, scale=2) if odd else processor
    fused = vpa.LogitsProcessor(comm, fused=True)
    wrong_hidden = hidden[:, 1:] if odd else hidden
    rows = hidden[:4] if odd else hidden
    bare = type("Bare", (), {"compute_logits": lambda self: None, "logits_processor": processor})() if odd else drafter
    for call, told in (
        (lambda: vpa.draft_tokens(drafter, wrong_hidden, 2, **given), "ValueError"),
        (lambda: vpa.draft_tokens(drafter, hidden, 3 if odd else 2, **given), "different num_draft_tokens"),
        (lambda: vpa.draft_tokens(drafter, hidden, 2, **(given if odd else {})), "different token_ids"),
        (lambda: processor.compute_logits(head, wrong_hidden), "ValueError"),
        (lambda: processor.get_top_tokens(head, wrong_hidden), "ValueError"),
        (lambda: processor.get_top_tokens("head" if odd else head, hidden), "TypeError"),
        (lambda: fused.get_top_tokens("head" if odd else head, hidden), "TypeError"),  # for host arrays in any case
        (lambda: fused.get_top_tokens([head] if odd else head, hidden), "Error"),
        (lambda: vpa.capture_drafts(drafter, hidden, 2, **given), "captured from GPU arrays"),
        (lambda: processor.get_top_tokens([head] if odd else head, hidden), "ValueError"),
        (lambda: processor.compute_logits(head, rows), "different rows"),
        (lambda: processor.get_top_tokens(head, rows), "different rows"),
        (lambda: other.compute_logits(head, hidden), "different transform"),
        (lambda: other.get_top_tokens(head, hidden), "different transform"),
        (lambda: (processor.compute_logits if odd else processor.get_top_tokens)(head, hidden), "different function"),
        (lambda: vpa.validate_local_argmax_reduction(bare), "Bare.get_top_tokens"),
    ):
        for text in comm.exchange(raised(call)):
            assert told in text, (told, text)
        assert np.array_equal(processor.get_top_tokens(head, hidden), processor.compute_logits(head, hidden).argmax(1))


if __name__ == "__main__":
    main()
