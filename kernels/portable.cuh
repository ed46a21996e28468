// portable.cuh: the few names whose spelling differs between CUDA, HIP and a C++ compiler that runs kernels on the CPU.
//
// Kernels are compiled from one string with no headers at hand (NVRTC and hiprtc see no <stdint.h>), so the integer
// types are spelled here. A "warp" is always 32 lanes: on AMD waves of 64 the width argument cuts a wave in two.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// HIP, with its headers or with none (hiprtc).
#if defined(__HIP__) || defined(__HIP_PLATFORM_AMD__)
#define VPA_HIP 1
#else
#define VPA_HIP 0
#endif

#define VPA_DEVICE static __device__ __forceinline__
#define VPA_WARP 32

// The most threads that a multiprocessor holds at once: fewer on desktop and embedded parts.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
#define VPA_RESIDENT 1024
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1100)
#define VPA_RESIDENT 1536
#else
#define VPA_RESIDENT 2048
#endif

// A structure given by value that is indexed at run time: read where it lies, not from a copy in each thread's stack.
#if defined(__CUDA_ARCH__)
#define VPA_GRID_CONSTANT const __grid_constant__
#else
#define VPA_GRID_CONSTANT const
#endif

// At most so many registers a thread that blocks of `threads` fill `resident` threads of a multiprocessor (16 blocks
// for small ones: no device takes fewer). On HIP the second number of __launch_bounds__ means something else.
#if VPA_HIP
#define VPA_LAUNCH_BOUNDS(threads, resident) __launch_bounds__(threads)
#else
#define VPA_LAUNCH_BOUNDS(threads, resident) \
    __launch_bounds__(threads, (resident) / (threads) < 16 ? (resident) / (threads) : 16)
#endif

// Instructions that only NVIDIA has, all of them from compute capability 8.0; every use has a portable form beside it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define VPA_NVIDIA 1
#else
#define VPA_NVIDIA 0
#endif

#if VPA_HIP
#define VPA_SHUFFLE_XOR(value, lane_mask) __shfl_xor((value), (lane_mask), VPA_WARP)
#else
#define VPA_SHUFFLE_XOR(value, lane_mask) __shfl_xor_sync(0xFFFFFFFFu, (value), (lane_mask), VPA_WARP)
#endif

VPA_DEVICE i64 smaller(i64 a, i64 b) {
    return b < a ? b : a;
}

VPA_DEVICE i64 larger(i64 a, i64 b) {
    return b > a ? b : a;
}

// 16 bytes as four words; the alignment makes reading them one instruction.
struct __align__(16) Words4 {
    u32 word[4];
};

// Read 16 bytes, 16-byte aligned, that no thread writes from here on. They are read once: no line is kept in L1.
VPA_DEVICE Words4 load_once(const Words4* address) {
#if VPA_NVIDIA
    Words4 w;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
                 : "l"(address));
    return w;
#else
    return *address;
#endif
}

// Where a launch allows it (programmatic dependent launch, compute capability 9.0), the next kernel of the stream may
// be brought onto the device from here on, and this one waits here for all that came before it. Called before the first
// access to memory that another kernel writes or reads; without effect in other launches and on other devices. Pointers
// of a kernel that calls it are not __restrict__: loads through those may be moved in front of the wait.
VPA_DEVICE void overlap_with_neighbours() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Clusters: blocks that run together and reach each other's shared memory (compute capability 9.0; VPA_SIMT: on the
// CPU).
#if defined(VPA_SIMT) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define VPA_CLUSTER_DIMS(blocks) __cluster_dims__(blocks, 1, 1)

// Waits for all threads of the cluster; what they wrote before is seen after.
VPA_DEVICE void cluster_barrier() {
#if defined(VPA_SIMT)
    __simt_cluster_barrier();
#else
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same in two parts, for a wait that other work hides: no thread returns from the second before all have come to
// the first. It orders no memory. On the CPU the second does all of it.
VPA_DEVICE void cluster_arrive() {
#if !defined(VPA_SIMT)
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

VPA_DEVICE void cluster_wait() {
#if defined(VPA_SIMT)
    __simt_cluster_barrier();
#else
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The object in the shared memory of the cluster's block `rank` that `object` is in this block's.
template <typename T>
VPA_DEVICE T* in_block(T* object, u32 rank) {
#if defined(VPA_SIMT)
    return __simt_cluster_map(object, rank);
#else
    T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(object), "r"(rank));
    return there;
#endif
}
#endif

// The largest value over the 32 lanes of a warp, in every lane.
VPA_DEVICE u32 warp_max(u32 value) {
#if VPA_NVIDIA
    return __reduce_max_sync(0xFFFFFFFFu, value);
#else
    for (i32 mask = VPA_WARP / 2; mask > 0; mask >>= 1) {
        const u32 other = VPA_SHUFFLE_XOR(value, mask);
        value = other > value ? other : value;
    }
    return value;
#endif
}
