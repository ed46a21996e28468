// How Python calls a kernel: for each one a trampoline that unpacks the arguments and a table of its parameters.
#pragma once

struct simt_parameter {
    unsigned size, align;
    char kind;  // 'p' pointer, 'i' signed integer, 'u' unsigned integer or bool, 'f' floating point, 's' anything else
    char pointee_kind;  // for a pointer: the same letters, 'v' for void
    char pointee_const, pad;
    unsigned pointee_size;
    const char* text;  // the compiler's name for a function that holds the type's name
};

struct simt_kernel {
    const char* name;
    const char* names;  // of the parameters, separated by commas
    void (*call)(void** arguments);
    const simt_parameter* parameters;
    unsigned count;
    unsigned max_threads;  // of __launch_bounds__; 0 without
    unsigned cluster[3];   // of __cluster_dims__
};

template <class T>
struct simt_kind {
    static constexpr char value = 's';
};
template <class T>
struct simt_kind<T*> {
    static constexpr char value = 'p';
};
template <>
struct simt_kind<void> {
    static constexpr char value = 'v';
};
#define SIMT_KIND(T, letter)                  \
    template <>                               \
    struct simt_kind<T> {                     \
        static constexpr char value = letter; \
    };
SIMT_KIND(bool, 'u')
SIMT_KIND(char, 'i')
SIMT_KIND(signed char, 'i')
SIMT_KIND(unsigned char, 'u')
SIMT_KIND(short, 'i')
SIMT_KIND(unsigned short, 'u')
SIMT_KIND(int, 'i')
SIMT_KIND(unsigned, 'u')
SIMT_KIND(long, 'i')
SIMT_KIND(unsigned long, 'u')
SIMT_KIND(long long, 'i')
SIMT_KIND(unsigned long long, 'u')
SIMT_KIND(float, 'f')
SIMT_KIND(double, 'f')
#undef SIMT_KIND

template <class T>
struct simt_plain {
    typedef T type;
    static constexpr bool is_const = false;
};
template <class T>
struct simt_plain<const T> {
    typedef T type;
    static constexpr bool is_const = true;
};
template <class T>
struct simt_plain<volatile T> {
    typedef T type;
    static constexpr bool is_const = false;
};
template <class T>
struct simt_plain<const volatile T> {
    typedef T type;
    static constexpr bool is_const = true;
};
template <class T>
struct simt_pointee {
    typedef void type;
};
template <class T>
struct simt_pointee<T*> {
    typedef T type;
};
template <class T>
struct simt_size {
    static constexpr unsigned value = sizeof(T);
};
template <>
struct simt_size<void> {
    static constexpr unsigned value = 0;
};

// Not instrumented: the tables and the packed arguments are the launcher's memory, not the kernel's.
#if defined(__clang__) && __has_attribute(disable_sanitizer_instrumentation)
#define SIMT_UNCHECKED __attribute__((noinline, no_sanitize("undefined"), disable_sanitizer_instrumentation))
#else
#define SIMT_UNCHECKED __attribute__((noinline, no_sanitize("thread"), no_sanitize("undefined")))
#endif

template <class T>
SIMT_UNCHECKED const char* simt_type_text() {
    return __PRETTY_FUNCTION__;
}

template <class T>
SIMT_UNCHECKED simt_parameter simt_describe() {
    typedef simt_plain<typename simt_pointee<T>::type> P;
    return {sizeof(T),
            alignof(T),
            simt_kind<T>::value,
            simt_kind<typename P::type>::value,
            P::is_const,
            0,
            simt_size<typename P::type>::value,
            simt_type_text<T>()};
}

template <int... I>
struct simt_indices {};
template <int N, int... I>
struct simt_make_indices : simt_make_indices<N - 1, N - 1, I...> {};
template <int... I>
struct simt_make_indices<0, I...> {
    typedef simt_indices<I...> type;
};

template <auto function>
struct simt_entry;
template <class... T, void (*function)(T...)>
struct simt_entry<function> {
    template <int... I>
    SIMT_UNCHECKED static void unpack(void** arguments, simt_indices<I...>) {
        function(*static_cast<T*>(arguments[I])...);
    }
    SIMT_UNCHECKED static void call(void** arguments) {
        unpack(arguments, typename simt_make_indices<sizeof...(T)>::type());
    }
    SIMT_UNCHECKED static simt_kernel describe(
        const char* name, const char* names, unsigned max_threads, unsigned x, unsigned y = 1, unsigned z = 1) {
        static const simt_parameter parameters[sizeof...(T) + 1] = {simt_describe<T>()...};
        return {name, names, call, parameters, sizeof...(T), max_threads, {x, y, z}};
    }
};

#ifdef __clang__
#define SIMT_TEXT_ENDS _Pragma("clang attribute pop")
#else
#define SIMT_TEXT_ENDS
#endif
#define SIMT_KERNEL(function, names, bound, ...) simt_entry<function>::describe(#function, names, bound, __VA_ARGS__),
#define SIMT_KERNEL_TABLE(...)                                                                                \
    extern "C" __attribute__((visibility("default"))) SIMT_UNCHECKED const simt_kernel* simt_kernel_table() { \
        static const simt_kernel table[] = {__VA_ARGS__ simt_kernel{}};                                       \
        return table;                                                                                         \
    }
