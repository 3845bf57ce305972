// Products of K-quantized weights with nine tokens or more.
//
// Eight or sixteen tokens lie side by side, four numbers of each, so that no token's sums are spread over a
// register and have to be added up. What a block of weights costs beside its multiplications, and its
// unpacking, is shared by all of them. Whole numbers are summed exactly, block by block; then each block
// adds to a token's sum in floating point. The bits do not depend on the number of tokens, but they are
// not those of ggml's ggml_vec_dot_* (and of k_quants.cpp), which keeps eight sums of a row apart.

#include "k_quants.h"

#ifdef HOMESPEC_KERNELS_BUILT

namespace homespec {
namespace {

constexpr int64_t PANEL = 128;  // tokens whose activations are laid out at a time: it bounds the memory
constexpr int FOURS = QK_K / 4;

// The activations of eight or sixteen tokens (V times eight) that meet one block of weights.
template <int V>
struct alignas(64) Side {
    int8_t q[FOURS][8 * V][4];
    int16_t sums_of_16[QK_K / 32][8 * V][2];
    int16_t sums_of_32[QK_K / 64][8 * V][2];
    float d[8 * V];
};

// A block of weights, unpacked: each number of `scales` stands twice, for two products at a time.
struct Block {
    alignas(32) uint8_t q[QK_K];
    alignas(32) int16_t scales[QK_K / 8];
    alignas(32) int16_t common[QK_K / 16];  // what all weights of a part have in common, for the sums
    float d, of_common;

    template <typename X>
    INLINE void unpack_weights(const X & x) {
#pragma GCC unroll 8
        for (int part = 0; part < 8; ++part) _mm256_store_si256((__m256i *) (q + 32 * part), weights_of(x, part));
    }
    INLINE void store_scales(int at, __m128i eight) {
        _mm_store_si128((__m128i *) (scales + 2 * at), _mm_unpacklo_epi16(eight, eight));
        _mm_store_si128((__m128i *) (scales + 2 * at + 8), _mm_unpackhi_epi16(eight, eight));
    }
    template <typename X>
    INLINE void unpack_parts(const X & x) {
        unpack_weights(x);
        const Parts parts(x.scales);
        store_scales(0, parts.scales);
        _mm_store_si128((__m128i *) common, parts.minima);
        d = GGML_CPU_FP16_TO_FP32(x.d);
        of_common = -GGML_CPU_FP16_TO_FP32(x.dmin);
    }
};

// SUMMED fours of products fit into 16 bits; PER_SCALE fours have one scale.
struct Q4_K {
    using block = block_q4_K;
    static constexpr int SUMMED = 8, PER_SCALE = 8, COMMON = QK_K / 64;
    static INLINE void unpack(const block & x, Block & to) { to.unpack_parts(x); }
    template <int V>
    static INLINE const int16_t (*sums(const Side<V> & y))[8 * V][2] { return y.sums_of_32; }
};

struct Q5_K : Q4_K {
    using block = block_q5_K;
    static constexpr int SUMMED = 4;
    static INLINE void unpack(const block & x, Block & to) { to.unpack_parts(x); }
};

struct Q6_K {
    using block = block_q6_K;
    static constexpr int SUMMED = 2, PER_SCALE = 4, COMMON = QK_K / 32;
    static INLINE void unpack(const block & x, Block & to) {
        to.unpack_weights(x);
        const __m256i scales = _mm256_cvtepi8_epi16(load_half(x.scales));
        to.store_scales(0, _mm256_castsi256_si128(scales));
        to.store_scales(8, _mm256_extracti128_si256(scales, 1));
        _mm256_store_si256((__m256i *) to.common, scales);
        to.d = GGML_CPU_FP16_TO_FP32(x.d);
        to.of_common = -32 * to.d;
    }
    template <int V>
    static INLINE const int16_t (*sums(const Side<V> & y))[8 * V][2] { return y.sums_of_16; }
};

// Four bytes, or two numbers of 16 bits, for all tokens.
INLINE __m256i spread(const void * p) {
    int32_t four;
    memcpy(&four, p, sizeof(four));
    return _mm256_set1_epi32(four);
}

// The whole-number sums of R rows and V times eight tokens.
template <int R, int V>
struct Sums {
    __m256i of[R][V];

    INLINE Sums() {
        for (auto & row : of) for (auto & sum : row) sum = _mm256_setzero_si256();
    }
    INLINE void add(int row, int v, __m256i more) { of[row][v] = _mm256_add_epi32(of[row][v], more); }
    INLINE __m256 value(int row, int v) const { return _mm256_cvtepi32_ps(of[row][v]); }
};

template <class Quant, int R, int V>
INLINE void add_products(const Block (&x)[R], const Side<V> & y, Sums<R, V> & sums) {
#pragma GCC unroll 1
    for (int first = 0; first < FOURS; first += Quant::SUMMED) {
        __m256i products[R][V];
#pragma GCC unroll 8
        for (int i = 0; i < Quant::SUMMED; ++i) {
#pragma GCC unroll 4
            for (int row = 0; row < R; ++row) {
                const __m256i weights = spread(x[row].q + 4 * (first + i));
#pragma GCC unroll 2
                for (int v = 0; v < V; ++v) {
                    const __m256i more = _mm256_maddubs_epi16(weights, load(y.q[first + i][8 * v]));
                    products[row][v] = i == 0 ? more : _mm256_add_epi16(products[row][v], more);
                    asm("" : "+x"(products[row][v]));  // or gcc puts off the additions, all products on the stack
                }
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < R; ++row) {
            const __m256i scale = spread(x[row].scales + 2 * (first / Quant::PER_SCALE));
            for (int v = 0; v < V; ++v) sums.add(row, v, _mm256_madd_epi16(products[row][v], scale));
        }
    }
}

template <class Quant, int R, int V>
INLINE void add_common(const Block (&x)[R], const Side<V> & y, Sums<R, V> & sums) {
    const auto * of_tokens = Quant::template sums<V>(y);
#pragma GCC unroll 1
    for (int i = 0; i < Quant::COMMON; ++i) {
        for (int row = 0; row < R; ++row) {
            const __m256i two = spread(x[row].common + 2 * i);
            for (int v = 0; v < V; ++v) sums.add(row, v, _mm256_madd_epi16(two, load(of_tokens[i][8 * v])));
        }
    }
}

// R rows with one group of tokens.
template <class Quant, int R, int V>
__attribute__((noinline)) void multiply_rows(const Product & p, int64_t row, int64_t first, int64_t count, const Side<V> * y) {
    __m256 sums[R][V];
    for (auto & of_row : sums) for (auto & sum : of_row) sum = _mm256_setzero_ps();
    for (int64_t i = 0; i < p.blocks; ++i) {
        Block x[R];
        for (int r = 0; r < R; ++r) {
            const auto * block = (const typename Quant::block *) p.A + (row + r) * p.lda + i;
            fetch_ahead(block + R * p.lda);
            Quant::unpack(*block, x[r]);
        }
        Sums<R, V> whole, common;
        add_products<Quant, R, V>(x, y[i], whole);
        add_common<Quant, R, V>(x, y[i], common);
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                const __m256 d = _mm256_load_ps(y[i].d + 8 * v);
                sums[r][v] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(x[r].d), d), whole.value(r, v), sums[r][v]);
                sums[r][v] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(x[r].of_common), d), common.value(r, v), sums[r][v]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        alignas(32) float of_tokens[8 * V];
        for (int v = 0; v < V; ++v) _mm256_store_ps(of_tokens + 8 * v, sums[r][v]);
        for (int64_t t = 0; t < count; ++t) p.C[(first + t) * p.ldc + row + r] = of_tokens[t];
    }
}

template <int V>
void lay_out(const Product & p, int64_t first, int64_t count, Side<V> * y) {
    for (int64_t i = 0; i < p.blocks; ++i) {
        if (count < 8 * V) memset((void *) (y + i), 0, sizeof(*y));
        for (int64_t t = 0; t < count; ++t) {
            const block_q8_K & x = p.B[(first + t) * p.ldb + i];
            for (int four = 0; four < FOURS; ++four) memcpy(y[i].q[four][t], x.qs + 4 * four, 4);
            for (int two = 0; two < QK_K / 32; ++two) memcpy(y[i].sums_of_16[two][t], x.bsums + 2 * two, 4);
            for (int part = 0; part < QK_K / 32; ++part) {
                y[i].sums_of_32[part / 2][t][part % 2] = x.bsums[2 * part] + x.bsums[2 * part + 1];
            }
            y[i].d[t] = x.d;
        }
    }
}

template <class Quant, int V>
void multiply_group(const Product & p, int64_t row, int64_t end, int64_t first, int64_t count, const Side<V> * y) {
    constexpr int R = 4 / V;  // their sums just fit into the registers
    for (; row + R <= end; row += R) multiply_rows<Quant, R, V>(p, row, first, count, y);
    for (; row < end; ++row) multiply_rows<Quant, 1, V>(p, row, first, count, y);
}

// Tokens of one panel times all rows: groups of sixteen, and one of eight where that is enough.
template <class Quant>
void multiply_panel(const Product & p, int64_t begin, int64_t end) {
    const int64_t n = end - begin, whole = (n + 7) / 16, rest = n - 16 * whole;  // the last of them may lack some
    auto * sixteens = (Side<2> *) scratch((whole * sizeof(Side<2>) + sizeof(Side<1>)) * p.blocks);
    auto * eight = (Side<1> *) (sixteens + whole * p.blocks);
    const auto size = [&](int64_t g) { return std::min<int64_t>(16, n - 16 * g); };
    for (int64_t g = 0; g < whole; ++g) lay_out<2>(p, begin + 16 * g, size(g), sixteens + g * p.blocks);
    if (rest > 0) lay_out<1>(p, begin + 16 * whole, rest, eight);
    share_rows(p, [&](int64_t row, int64_t last) {
        for (int64_t g = 0; g < whole; ++g) {
            multiply_group<Quant, 2>(p, row, last, begin + 16 * g, size(g), sixteens + g * p.blocks);
        }
        if (rest > 0) multiply_group<Quant, 1>(p, row, last, begin + 16 * whole, rest, eight);
    });
}

template <class Quant>
void multiply(const Product & p) {
    for (int64_t begin = 0; begin < p.n; begin += PANEL) multiply_panel<Quant>(p, begin, std::min(p.n, begin + PANEL));
}

}  // namespace

bool multiply_wide(int type, const Product & p) {
    switch (type) {
        case GGML_TYPE_Q4_K: multiply<Q4_K>(p); return true;
        case GGML_TYPE_Q5_K: multiply<Q5_K>(p); return true;
        case GGML_TYPE_Q6_K: multiply<Q6_K>(p); return true;
        default: return false;
    }
}

}  // namespace homespec

#endif
