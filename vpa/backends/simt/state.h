// The executor's data: what Python passes in and reads back, and the threads, warps and blocks of the running launch.
#pragma once

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

// --- Shared with Python (abi.py mirrors these structures field by field) ---

enum Fault : u32 {
    FAULT_NONE = 0,
    FAULT_RACE,
    FAULT_OUT_OF_BOUNDS,
    FAULT_MISALIGNED,
    FAULT_UNINITIALIZED,
    FAULT_READ_ONLY,
    FAULT_NULL,
    FAULT_ARITHMETIC,
    FAULT_DIVERGENCE,
    FAULT_HANG,
    FAULT_TRAP,
    FAULT_CRASH,
    FAULT_STACK,
};
enum Status : u32 { STATUS_DONE = 0, STATUS_PAUSED = 1, STATUS_FAULT = 2 };
enum Space : u32 {
    SPACE_NONE = 0,
    SPACE_GLOBAL,
    SPACE_STATIC_SHARED,
    SPACE_DYNAMIC_SHARED,
    SPACE_VARIABLE,
    SPACE_LOCAL
};
// Flags; READ is the absence of WRITE. OVERWRITE: an atomic write that does not depend on what was there.
enum Access : u32 { READ = 0, WRITE = 1, ATOMIC = 2, VOLATILE = 4, OVERWRITE = 8 };
enum { MAX_FRAMES = 24, MAX_CALLS = 48 };
enum { PERMIT_READ = 1, PERMIT_WRITE = 2 };

// Memory that the kernel may use. `permissions`, where given, has one byte of PERMIT flags per byte of the region.
struct Region {
    uintptr_t low;
    u64 size;
    u32 space, permit;
    const u8* permissions;
    // The checker's own part
    void* cells;  // shadow cells; null where nothing can race
    u32 shift;    // log2 of the bytes that one cell stands for; Python puts a first guess
    u32 base;     // stamps below this one are from before the launch (or before the block, in shared memory)
    u32 index;    // among the launch's; from MAX_REGIONS on: a window onto another block's shared memory
    u32 pad;
};

// A thread and what it does: one side of a fault.
struct Actor {
    u64 block;
    u32 thread, flags;
    const char* doing;  // the name of a barrier or warp operation; null for memory
    u32 frame_count, pad;
    u64 frames[MAX_FRAMES];  // return addresses relative to the module, innermost first
};

struct Report {
    u32 fault, space;
    u64 address, size;
    u32 has_other, line, column;
    u32 owner;  // 1 + the block whose shared memory it is, if not the thread's own
    const char* file;
    Actor actor, other;
    char text[256];
};

struct Launch {
    u32 grid[3], block[3];
    u32 warp_size, region_count;
    void (*call)(void**);
    void** arguments;
    const u64* order;  // linear block numbers in the order they start; null: ascending
    Region* regions;   // ascending and disjoint; the last two are static and dynamic shared memory (relative to the TLS
                       // anchor)
    u32 slice_ms, resident_blocks, shuffles_order_memory, cluster[3];
    i64 shared_low, dynamic_low;  // where static and dynamic shared memory begin, relative to the TLS anchor
    i64 image_low;                // the same for both together, to be exchanged when blocks take turns
    u64 image_size;
    uintptr_t constant_low,
        constant_high;  // the module's read-only image: literals and tables that may be read by anyone
    void** pool;
    i32 (*compare_sites)(const Actor*, const Actor*);  // 0: the same place in the source; <0: the first comes earlier
    Report report;
};

// --- The running launch ---

struct Dim {
    u32 x, y, z;
};

struct Fence;
struct Log;
struct Slot;
struct Warp;
struct Fiber;

struct Link {
    Log* log;
    u32 version;
};
struct Links {
    Link* items;
    u32 count, capacity;
};

enum FiberState : u8 { RUNNING = 0, IN_OPERATION, AT_BARRIER, EXITED };

struct alignas(64) Fiber {
    void* context;
    Dim index;
    u32 gid, number, lane;  // number: linear thread in its block; gid: linear thread in the grid
    u8 state;
    Warp* warp;
    Slot* slot;
    // What it waits for
    u32 op, pad;
    i32 source;
    u64 mask, value, result;
    void* pc;
    // The checker's part
    u32 stamp, depth;
    Fence* fence;
    Links acquired;
    u32 spin_count;  // atomic and volatile reads since its last write
    bool slept;      // since hang.h last looked at it
    u32 looks, seen_epoch, stuck_epoch;
    u64 seen;
    uintptr_t stack_low, stack_high;
    void* calls[MAX_CALLS];
};

struct Warp {
    u64 exists, live, ready, waiting, asleep;  // one bit a lane
    Fiber* fibers;
    Slot* slot;
    Fiber* leader;  // the first lane that waits now
    u32 number;
    bool uniform;  // all waiting lanes called what the leader called, from the same place
    u32 stamp;     // accesses of this warp up to this stamp happened before what its lanes do now
    u32* matrix;   // [lane][other lane]: the same for partial masks; null until the first one
};

// An access: who, at which stamp, and `where`: return address relative to the module << 3 | WRITE, ATOMIC, VOLATILE.
struct Record {
    u32 stamp, gid, where;
};

// Blocks that run together; without __cluster_dims__ each is alone in one.
enum { MAX_CLUSTER = 16, IMAGE_MARGIN = 4096 };
struct Cluster {
    u32 size;
    u32 barrier_stamp;         // accesses of its blocks up to this stamp happened before what they do now
    Slot* slots[MAX_CLUSTER];  // by rank
};

// A resident block: its threads' stacks, its copy of shared memory while another block runs, its shadow of shared
// memory.
struct Slot {
    Dim index;
    u64 number;
    u32 first_gid, threads, warp_count, live, arrived;
    i32 sum, all, any;  // of the barrier's predicates
    i32 result_sum, result_all, result_any;
    u32 start, barrier_stamp;
    u32 idle_rounds;
    bool mixed_barrier, open, saved;  // saved: its shared memory lies in the image
    Fiber* first_arrival;
    Fence* fence;
    Links acquired;
    Fiber* fibers;
    Warp* warps;
    char* stacks;
    u32 capacity;
    u8* image;  // has IMAGE_MARGIN bytes on both sides
    u64 image_size;
    void* cells[2];
    u64 cell_bytes[2];
    u32 shift[2];
    Cluster* cluster;
    u32 rank;
    bool at_cluster_barrier;     // all its threads
    Cluster own_cluster;         // of which this is the first slot
    Region windows[2];           // its shared memory as other blocks of the cluster see it, in the image
    Record remote[MAX_CLUSTER];  // by rank: the last access of another block to it, until it is known to be over
    uintptr_t remote_address[MAX_CLUSTER];
};

// Memory that outlives a launch and is shared by every module of the process (launches are serialised by Python).
enum { MAX_SLOTS = 1024, MAX_REGIONS = 256 };
struct Pool {
    u32 stamp;
    u32 slot_count;
    Slot* slots[MAX_SLOTS];
    void* cells[MAX_REGIONS];
    u64 cell_bytes[MAX_REGIONS];
    u64 region_size[MAX_REGIONS];
    u8 region_shift[MAX_REGIONS];
    char* signal_stack;
};

struct State {
    Launch* launch;
    Pool* pool;
    Slot* slot;
    Fiber* current;  // null while the scheduler itself runs
    void* main_context;
    Region* last;
    Region* static_shared;
    Region* dynamic_shared;
    volatile u32 tick;  // set by the timer: give way at the next opportunity
    volatile u32 busy;  // above 0: the timer may not switch threads now
    u32 stamp;
    u32 fault;
    u64 next_block, block_count;
    u32 threads, warp_shift, resident, resident_limit, cluster_size;
    u32 budget;
    u64 progress, progress_seen, writes, writes_seen;
    u32 epoch;  // counts what could end a poll: see hang.h
    i64 quiet_since, tick_time, slice_start;
    void (*request)(Fiber*);  // to be run by the scheduler for the requester
    Fiber* requester;
    u64 owner;             // the host thread that launched
    Slot* deferred_slot;   // a read of uninitialised shared memory is reported once it is known not to be a race
    bool deferred_remote;  // of another block's
    Report deferred;
    Log** logs;
    u32 log_count, log_capacity, query;
    Links scratch;
    bool fenced;
    void* arena;
    uintptr_t tls_low;
    u64 tls_size;
};

static State state;

extern "C" __attribute__((visibility("hidden")))
const char __ehdr_start[];  // the linker's name for the image's first byte

static inline u64 bit(u32 lane) {
    return (u64)1 << lane;
}
static inline u32 lowest(u64 bits) {
    return (u32)__builtin_ctzll(bits);
}

extern "C" {
// A section of their own: clang reads them through the hooks, which let the section pass.
#define BUILTIN __attribute__((section("simt_builtin")))
extern Dim threadIdx, blockIdx, blockDim, gridDim;
BUILTIN Dim threadIdx = {0, 0, 0}, blockIdx = {0, 0, 0}, blockDim = {0, 0, 0}, gridDim = {0, 0, 0};
extern __attribute__((visibility("hidden"))) const char __start_simt_builtin[], __stop_simt_builtin[];
thread_local char simt_tls_anchor;
}
