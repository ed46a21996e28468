"""Published figures of interconnects: what a GPU's link carries one way, and what a step of a ring takes on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """bytes_per_us: peak of one GPU, over a network of its adapter, in one direction (1 GB/s is 1000 bytes per
    microsecond). step_us: latency of a step of a ring of small messages. network: between machines, rather than within
    one. source: where the peak is stated."""

    name: str
    words: str
    bytes_per_us: float
    step_us: float
    network: bool
    source: str


#: Latencies of a step: NCCL's own estimates, ``hwLat`` of its ``src/graph/tuning.cc`` (2.19 to 2.28), protocol LL on a
#: ring, for NVLink, PCIe and the network.
_NVLINK_US, _PCIE_US, _NETWORK_US = 0.6, 1.0, 2.7

LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink4", "NVLink 4, 900 GB/s both ways", 450e3, _NVLINK_US, False, "NVIDIA, H100 and H200 data sheets"),
        Link("nvlink5", "NVLink 5, 1800 GB/s both ways", 900e3, _NVLINK_US, False, "NVIDIA, NVLink product page"),
        Link("pcie5", "PCIe 5.0 x16", 63e3, _PCIE_US, False, "PCI-SIG: 32 GT/s a lane, 128b/130b"),
        Link("ib-hdr", "InfiniBand HDR, 200 Gb/s a GPU", 25e3, _NETWORK_US, True, "IBTA roadmap; NVIDIA ConnectX-6"),
        Link("ib-ndr", "InfiniBand NDR, 400 Gb/s a GPU", 50e3, _NETWORK_US, True, "IBTA roadmap; NVIDIA ConnectX-7"),
        Link("ib-xdr", "InfiniBand XDR, 800 Gb/s a GPU", 100e3, _NETWORK_US, True, "IBTA roadmap; NVIDIA ConnectX-8"),
        Link(
            "eth-100", "100 Gb/s Ethernet a GPU", 12.5e3, _NETWORK_US, True, "IEEE 802.3; with RDMA, as NCCL's latency"
        ),
        Link(
            "eth-400", "400 Gb/s Ethernet a GPU", 50e3, _NETWORK_US, True, "IEEE 802.3bs; with RDMA, as NCCL's latency"
        ),
    )
}
