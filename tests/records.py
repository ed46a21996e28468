"""Rows of records, made up."""

from __future__ import annotations


def row(rows: int, arm: str, median: float | None, wrong: int | None = 0, **more) -> dict:
    """A timed row, or one that was only checked: ``median`` None."""
    samples = [] if median is None else [median - 1, median, median + 1]
    return {
        "rows": rows, "dtype": "bfloat16", "input": "random", "seed": 0, "vocab": 131072, "tp": 4, "columns": 32768,
        "layout": "packed", "backend": "raw", "gather": "excluded", "mode": "captured", "cache": "hot", "arm": arm,
        "part": "", "strides": "", "external": False, "kernels": None, "wrong": wrong, "skipped": "", "calls": 20,
        "samples_us": samples, "median_us": median, "bytes_moved": None, "hidden_size": None,
        "acceptance_length": None, "sampling_requests": None,
        **more,
    }  # fmt: skip


#: Made-up microseconds on a GPU: arm -> (at no rows, times a plain read), whole and local.
ARMS = {
    "raw": ((3.2, 1.05), (1.9, 1.03)),
    "numba": ((4.4, 1.15), (2.8, 1.1)),
    "existing (cupy)": ((27.0, 4.0), (12.0, 3.8)),
    "existing (torch)": ((21.0, 2.2), (10.0, 2.0)),
    "triton (by lane)": ((6.2, 1.4), (3.5, 1.4)),
}
EXTERNAL = ("existing (torch)", "triton (by lane)")


def comparison(sizes: tuple[int, ...] = (1, 8, 64), dtypes: tuple[str, ...] = ("bfloat16", "float32")) -> list[dict]:
    """Timed rows as ``compare`` gives them: each arm whole and in parts, the noise control and floors."""
    rows = []
    for dtype in dtypes:
        for size in sizes:
            read = 1.2 + size * 32768 * (4 if dtype == "float32" else 2) / 4.2e6
            more = {"dtype": dtype, "strides": "contiguous"}
            for arm, parts in ARMS.items():
                for part, kernels, (start, share) in zip(("pair", "local"), (2.0, 1.0), parts, strict=True):
                    time = round(start + share * read, 3)
                    rows.append(row(size, arm, time, part=part, kernels=kernels, external=arm in EXTERNAL, **more))
            rows.append(row(size, "raw (again)", round(3.21 + 1.05 * read, 3), part="pair", **more))
            rows.append(row(size, "torch.argmax", round(4 + 1.9 * read, 3), part="local", external=True, **more))
            rows.append(row(size, "floor: plain read", round(read, 3), None, **more))
    return rows
