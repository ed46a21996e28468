// Shadow memory: for every few bytes the last write and two other accesses.
//
// A cell stands for 16 bytes until an access needs less; then the region's cells are split to that size. So sizes of
// 1, 2, 4, 8 and 16 bytes are exact, and a kernel that only uses wide accesses pays for wide cells.
#pragma once

struct Cell {
    Record write, first, second;
};

static void release_cells(void*& cells, u64& bytes) {
    if (cells)
        munmap(cells, bytes);
    cells = nullptr;
    bytes = 0;
}

static void cells_reserve(void*& cells, u64& bytes, u64 need) {
    if (bytes >= need)
        return;
    release_cells(cells, bytes);
    need = (need + 65535) & ~(u64)65535;
    cells = mmap(nullptr, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED)
        abort();
    if (need >= (u64)4 << 20)
        madvise(cells, need, MADV_HUGEPAGE);
    bytes = need;
}

static u64 cells_size(const Region* r, u32 shift) {
    u64 span = r->low + r->size - (r->low & ~(uintptr_t)15);
    return ((span >> shift) + 2) * sizeof(Cell);
}

static void** cells_owner(Region* r, u64*& bytes) {
    if (is_shared(r)) {
        u32 which = r->space == SPACE_DYNAMIC_SHARED;
        Slot* slot = owner_of(r);
        slot->shift[which] = r->shift + 1;  // 0: not known yet
        bytes = &slot->cell_bytes[which];
        return &slot->cells[which];
    }
    bytes = &state.pool->cell_bytes[r->index];
    return &state.pool->cells[r->index];
}

static void split_cells(Region* r, u32 shift) {
    ++state.busy;
    u32 old_shift = r->shift, ways = old_shift - shift;
    u64 count = cells_size(r, old_shift) / sizeof(Cell);
    r->shift = shift;
    u64* bytes;
    void** place = cells_owner(r, bytes);
    Cell* old = (Cell*)*place;
    u64 old_bytes = *bytes, need = cells_size(r, shift) + (sizeof(Cell) << ways);
    if (old_bytes < need) {
        *place = nullptr;
        *bytes = 0;
        cells_reserve(*place, *bytes, need);
    }
    Cell* fresh = (Cell*)*place;
    u64 top = cells_size(r, shift) / sizeof(Cell);
    for (u64 i = count; i-- > 0;) {  // downwards: in place, the cells grow over cells that were already copied
        Cell cell = old[i];
        for (u64 k = 0; k < (u64)1 << ways; ++k)
            if ((i << ways) + k < top)
                fresh[(i << ways) + k] = cell;
    }
    if (fresh != old)
        munmap(old, old_bytes);
    r->cells = fresh;
    --state.busy;
}
