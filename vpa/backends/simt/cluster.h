// What a kernel text asks about the cluster that its block belongs to.
#pragma once

extern "C" {
unsigned simt_cluster_rank() noexcept {
    return state.slot->rank;
}

unsigned simt_cluster_size() noexcept {
    return state.slot->cluster->size;
}

// Where another block of the cluster has what this one has at `pointer`, in its shared memory.
void* simt_cluster_map(const void* pointer, unsigned rank) noexcept {
    const Cluster* cluster = state.slot->cluster;
    uintptr_t offset = (uintptr_t)pointer - state.tls_low;
    char text[128];
    if (offset >= state.tls_size) {
        snprintf(text, sizeof text, "__simt_cluster_map() of %p, which is not in the block's shared memory", pointer);
        fault_in_thread(FAULT_OUT_OF_BOUNDS, __builtin_return_address(0), text);
    }
    if (rank >= cluster->size) {
        snprintf(text, sizeof text, "__simt_cluster_map() to rank %u of a cluster of %u", rank, cluster->size);
        fault_in_thread(FAULT_OUT_OF_BOUNDS, __builtin_return_address(0), text);
    }
    return rank == state.slot->rank ? (void*)pointer : cluster->slots[rank]->image + offset;
}
}
