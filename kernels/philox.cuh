// philox.cuh: the draws of synthetic acceptance: Philox4x32-10 (Salmon et al., 2011). The same on every rank.

// The first of the four words of a counter (position, 0) under a 64-bit key.
VPA_DEVICE u32 philox(u64 key, u64 position) {
    u32 key_low = (u32)key;
    u32 key_high = (u32)(key >> 32);
    u32 word[4] = {(u32)position, (u32)(position >> 32), 0, 0};
#pragma unroll
    for (i32 round = 0; round < 10; round++) {
        const u64 first = (u64)word[0] * 0xD2511F53u;
        const u64 second = (u64)word[2] * 0xCD9E8D57u;
        word[0] = (u32)(second >> 32) ^ word[1] ^ key_low;
        word[1] = (u32)second;
        word[2] = (u32)(first >> 32) ^ word[3] ^ key_high;
        word[3] = (u32)first;
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
    return word[0];
}

// A number in (0, 1). The step is just below 2^-31, so that the largest is below 1 although it is rounded.
VPA_DEVICE float draw(i64 seed, i64 position) {
    const i32 word = (i32)philox((u64)seed, (u64)position);
    const float step = __uint_as_float(0x2FFFFFFFu);
    const float number = (float)(word < 0 ? ~word : word) * step;
    return number > step ? number : step;
}
