// Memory for one launch's clocks, and growing arrays in it; freed as a whole when the next launch starts.
#pragma once

static void* arena_take(size_t size) {
    struct Chunk {
        Chunk* next;
        size_t used, size;
    };
    size = (size + 15) & ~(size_t)15;
    Chunk* chunk = (Chunk*)state.arena;
    if (!chunk || chunk->size - chunk->used < size) {
        size_t room = size + sizeof(Chunk) + 16 > 65536 ? size + sizeof(Chunk) + 16 : 65536;
        Chunk* fresh = (Chunk*)malloc(room);
        if (!fresh)
            abort();
        *fresh = {chunk, (sizeof(Chunk) + 15) & ~(size_t)15, room};
        state.arena = chunk = fresh;
    }
    void* result = (char*)chunk + chunk->used;
    chunk->used += size;
    return memset(result, 0, size);
}

static void arena_clear() {
    while (state.arena) {
        void* next = *(void**)state.arena;
        free(state.arena);
        state.arena = next;
    }
}

template <class T>
static void append(T*& items, u32& count, u32& capacity, const T& item) {
    if (count == capacity) {
        u32 larger = capacity ? 2 * capacity : 4;
        T* fresh = (T*)arena_take(larger * sizeof(T));
        if (count)
            memcpy((void*)fresh, (const void*)items, count * sizeof(T));
        items = fresh;
        capacity = larger;
    }
    items[count++] = item;
}
