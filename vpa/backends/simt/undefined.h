// The entry points of -fsanitize=alignment,bounds,shift-exponent,...: each reports the undefined operation and ends the
// launch.
#pragma once

struct SourcePlace {
    const char* file;
    u32 line, column;
};
struct TypeText {
    u16 kind, info;  // kind 0: an integer; info: 1 for signed | log2 of the bits << 1
    char name[1];
};
struct OperationData {
    SourcePlace place;
    const TypeText* type;
    const TypeText* second;
};
struct MismatchData {
    SourcePlace place;
    const TypeText* type;
    u8 log_alignment, kind;
};

static void undefined(Fault fault, const SourcePlace& place, void* pc, const char* text) {
    Report& report = state.launch->report;
    report.file = place.file;
    report.line = place.line;
    report.column = place.column;
    fault_in_thread(fault, pc, text);
}

static i64 signed_value(const TypeText* type, uintptr_t value) {
    u32 bits = 1u << (type->info >> 1);
    if (type->kind || bits > 64)
        return 0;
    if (bits < 64)
        value =
            type->info & 1 ? (uintptr_t)((i64)(value << (64 - bits)) >> (64 - bits)) : value & (((u64)1 << bits) - 1);
    return (i64)value;
}

static void overflow(OperationData* data, uintptr_t left, uintptr_t right, const char* sign, void* pc) {
    char text[256];
    snprintf(text, sizeof text, "%lld %s %lld does not fit in %s", (long long)signed_value(data->type, left), sign,
             (long long)signed_value(data->type, right), data->type->name);
    undefined(FAULT_ARITHMETIC, data->place, pc, text);
}

extern "C" {
#define BOTH(name, parameters, body) \
    void __ubsan_handle_##name parameters body void __ubsan_handle_##name##_abort parameters body

BOTH(add_overflow, (OperationData * data, uintptr_t a, uintptr_t b), { overflow(data, a, b, "+", CALLER); })
BOTH(sub_overflow, (OperationData * data, uintptr_t a, uintptr_t b), { overflow(data, a, b, "-", CALLER); })
BOTH(mul_overflow, (OperationData * data, uintptr_t a, uintptr_t b), { overflow(data, a, b, "*", CALLER); })
BOTH(negate_overflow, (OperationData * data, uintptr_t a), { overflow(data, 0, a, "-", CALLER); })
BOTH(divrem_overflow, (OperationData * data, uintptr_t a, uintptr_t b), {
    if (signed_value(data->type, b))
        overflow(data, a, b, "/", CALLER);
    else
        undefined(FAULT_ARITHMETIC, data->place, CALLER, "division by zero");
})
BOTH(shift_out_of_bounds, (OperationData * data, uintptr_t a, uintptr_t b), {
    char text[256];
    snprintf(text, sizeof text, "a shift of %lld by %lld bits: %s has %u", (long long)signed_value(data->type, a),
             (long long)signed_value(data->second, b), data->type->name, 1u << (data->type->info >> 1));
    undefined(FAULT_ARITHMETIC, data->place, CALLER, text);
})
BOTH(out_of_bounds, (OperationData * data, uintptr_t index), {
    char text[256];
    snprintf(text, sizeof text, "index %lld is outside %s", (long long)signed_value(data->second, index),
             data->type->name);
    undefined(FAULT_OUT_OF_BOUNDS, data->place, CALLER, text);
})
BOTH(type_mismatch_v1, (MismatchData * data, uintptr_t address), {
    Report& report = state.launch->report;
    report.address = address;
    report.size = (u64)1 << data->log_alignment;
    if (address < 0x400000)
        undefined(FAULT_NULL, data->place, CALLER, nullptr);
    char text[256];
    snprintf(text, sizeof text, "%s needs an address that is a multiple of %u", data->type->name,
             1u << data->log_alignment);
    undefined(FAULT_MISALIGNED, data->place, CALLER, text);
})
BOTH(builtin_unreachable, (SourcePlace * place), {
    undefined(FAULT_TRAP, *place, CALLER, "a place marked unreachable");
    __builtin_unreachable();
})
BOTH(missing_return, (SourcePlace * place), {
    undefined(FAULT_TRAP, *place, CALLER, "the end of a function that must return a value");
    __builtin_unreachable();
})
}
