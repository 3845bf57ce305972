// What the kernels for K-quants share: a product and its threads, and the unpacking of blocks.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpu-impl.h"
#include "ggml-quants.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#define HOMESPEC_KERNELS_BUILT
#define INLINE inline __attribute__((always_inline))

namespace homespec {

INLINE __m256i load(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
INLINE __m128i load_half(const void * p) { return _mm_loadu_si128((const __m128i *) p); }
INLINE __m256i twice(__m128i x) { return _mm256_set_m128i(x, x); }

// One product of weights (m rows of `blocks` blocks) with activations (n tokens): C[t][row].
struct Product {
    const ggml_compute_params * params;
    int64_t m, n, blocks;
    const void * A;
    int64_t lda;
    const block_q8_K * B;
    int64_t ldb;
    float * C;
    int64_t ldc;
};

// Where a thread lays out activations, at a multiple of 64; the next call takes it over.
inline char * scratch(size_t bytes) {
    thread_local std::vector<char> buffer;
    if (buffer.size() < bytes + 64) buffer.resize(bytes + 64);
    return buffer.data() + (-(uintptr_t) buffer.data() & 63);
}

constexpr int64_t CHUNK = 16;  // rows that a thread takes at a time, at most; they stay in its L2 cache

// All rows, shared out: `f(first, end)` multiplies some. Every thread of the product calls it.
template <typename F>
void share_rows(const Product & p, F f) {
    ggml_threadpool * pool = p.params->threadpool;
    if (p.params->ith == 0) ggml_threadpool_chunk_set(pool, p.params->nth);
    ggml_barrier(pool);
    const int64_t rows = std::clamp<int64_t>(p.m / (4 * p.params->nth), 1, CHUNK);
    for (int64_t chunk = p.params->ith; chunk * rows < p.m; chunk = ggml_threadpool_chunk_add(pool, 1)) {
        f(chunk * rows, std::min(p.m, (chunk + 1) * rows));
    }
    ggml_barrier(pool);
}

// Have the memory fetch a block of the rows to come while this one is multiplied: the hardware alone is late.
template <typename Block>
INLINE void fetch_ahead(const Block * x) {
    for (size_t at = 0; at < sizeof(Block); at += 64) _mm_prefetch((const char *) x + at, _MM_HINT_T0);
}

// The scales, and the minima, of the eight parts of a block of Q4_K or Q5_K: six bits each in the file.
struct Parts {
    __m128i scales, minima;

    INLINE Parts(const uint8_t * packed) {
        constexpr uint32_t mask1 = 0x3f3f3f3f, mask2 = 0x0f0f0f0f, mask3 = 0x03030303;
        uint32_t in[3];
        memcpy(in, packed, sizeof(in));
        const __m256i both = _mm256_cvtepu8_epi16(_mm_set_epi32(
            (int) (((in[2] >> 4) & mask2) | (((in[1] >> 6) & mask3) << 4)), (int) (in[1] & mask1),
            (int) ((in[2] & mask2) | (((in[0] >> 6) & mask3) << 4)), (int) (in[0] & mask1)));
        scales = _mm256_castsi256_si128(both);
        minima = _mm256_extracti128_si256(both, 1);
    }
};

// 32 weights of a block, as they stand in the file: the `part`th of eight.
INLINE __m256i weights_of(const block_q4_K & x, int part) {
    const __m256i two = load(x.qs + 32 * (part / 2));
    return _mm256_and_si256(part % 2 ? _mm256_srli_epi16(two, 4) : two, _mm256_set1_epi8(15));
}

INLINE __m256i weights_of(const block_q5_K & x, int part) {
    const __m256i two = load(x.qs + 32 * (part / 2)), fifths = load(x.qh);
    const __m256i nibbles = _mm256_and_si256(part % 2 ? _mm256_srli_epi16(two, 4) : two, _mm256_set1_epi8(15));
    // the fifth bits are the bits `part` of the bytes of `fifths`
    const __m256i moved = part < 4 ? _mm256_slli_epi16(fifths, 4 - part) : _mm256_srli_epi16(fifths, part - 4);
    return _mm256_or_si256(nibbles, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
}

// 32 too large.
INLINE __m256i weights_of(const block_q6_K & x, int part) {
    const int half = part / 4, quarter = part % 4;
    const __m256i two = load(x.ql + 64 * half + 32 * (quarter % 2)), uppers = load(x.qh + 32 * half);
    const __m256i nibbles = _mm256_and_si256(quarter < 2 ? two : _mm256_srli_epi16(two, 4), _mm256_set1_epi8(15));
    const __m256i of_part = _mm256_and_si256(uppers, _mm256_set1_epi8((char) (3 << 2 * quarter)));
    const __m256i upper = quarter < 2 ? _mm256_slli_epi16(of_part, 4 - 2 * quarter)
                                      : _mm256_srli_epi16(of_part, 2 * quarter - 4);
    return _mm256_or_si256(nibbles, upper);
}

// k_quants_wide.cpp: the product with many tokens. False for another type of weights.
bool multiply_wide(int type, const Product & p);

}  // namespace homespec

#endif
