// Products of K-quantized weights with several tokens at once, for x86 CPUs with AVX2.
//
// llama.cpp multiplies a row of weights with one token at a time: every token unpacks the row anew,
// so a pass over four tokens costs nearly three times a pass over one. Here a row is unpacked once
// for up to eight tokens. Each product is summed in the order of ggml's ggml_vec_dot_*, so the bits
// are those of one token at a time: verifying a draft rounds as decoding does. More tokens are
// multiplied otherwise (k_quants_wide.cpp).
//
// ggml asks llamafile_sgemm before it multiplies row by row; the linker's --wrap puts this file in
// front of it. HOMESPEC_KERNELS in the environment: 0 leaves everything to ggml, `exact` keeps these
// bits for any number of tokens. It is read once.

#include "k_quants.h"
#include "llamafile/sgemm.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <type_traits>

extern "C" {
bool __real_llamafile_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
                            const void * A, int64_t lda, const void * B, int64_t ldb, void * C, int64_t ldc,
                            int Atype, int Btype, int Ctype);
bool __wrap_llamafile_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
                            const void * A, int64_t lda, const void * B, int64_t ldb, void * C, int64_t ldc,
                            int Atype, int Btype, int Ctype);
// Products computed here so far; -1 where this CPU's instructions are not built for.
GGML_BACKEND_API int64_t homespec_products(void);
}

#ifdef HOMESPEC_KERNELS_BUILT

namespace homespec {
namespace {

constexpr int MOST_TOKENS = 8;  // of a group: their sums just fit into the registers
constexpr int64_t PANEL = 64;   // tokens whose activations are laid out at a time: it bounds the memory
constexpr int64_t WIDE = 9;     // tokens from which on the other kernel is the faster one

// The activations of T tokens that meet one block of weights: `d` are their scales, the sums are of
// 16 and of 32 neighbours, for what all weights of a block have in common.
template <int T>
struct alignas(32) Activations {
    int8_t q[T][QK_K];
    int16_t sums_of_16[T][QK_K / 16];
    int16_t sums_of_32[T][QK_K / 32];
    alignas(32) float d[MOST_TOKENS];
};

// A factor of the weights times that of each token.
struct Factors {
    alignas(32) float each[MOST_TOKENS];

    INLINE Factors(const float * of_tokens, float of_weights) {
        _mm256_store_ps(each, _mm256_mul_ps(_mm256_load_ps(of_tokens), _mm256_set1_ps(of_weights)));
    }
    INLINE __m256 of(int t) const { return _mm256_broadcast_ss(each + t); }
};

// Byte indices that spread the 16-bit numbers `low` and `high` of eight over the two halves.
INLINE __m256i spread(int low, int high) {
    return _mm256_set_m128i(_mm_set1_epi16((short) (0x0100 + 0x0202 * high)),
                            _mm_set1_epi16((short) (0x0100 + 0x0202 * low)));
}

// The whole-number sums of one block, for each token.
template <int T>
struct WholeSums {
    __m256i each[T];

    INLINE WholeSums() {
        for (int t = 0; t < T; ++t) each[t] = _mm256_setzero_si256();
    }

    // 32 weights, unsigned, with their scale, and the activations from `first` on: the sums of four
    // products are added. They stay in registers: gcc would put off the additions, and all products
    // on the stack.
    INLINE void add(__m256i weights, __m256i scale, const Activations<T> & y, int first) {
        for (int t = 0; t < T; ++t) {
            const __m256i products = _mm256_maddubs_epi16(weights, load(y.q[t] + first));
            each[t] = _mm256_add_epi32(each[t], _mm256_madd_epi16(scale, products));
            asm("" : "+x"(each[t]));
        }
    }
};

// The sums of a row so far, for each token: eight, which are added up at its end.
template <int T>
struct RowSums {
    __m256 each[T];

    INLINE RowSums() {
        for (int t = 0; t < T; ++t) each[t] = _mm256_setzero_ps();
    }

    INLINE void add(const WholeSums<T> & whole, const Factors & d) {
        for (int t = 0; t < T; ++t) each[t] = _mm256_fmadd_ps(d.of(t), _mm256_cvtepi32_ps(whole.each[t]), each[t]);
    }

    // In the order of hsum_float_8 in ggml's arch/x86/quants.c.
    INLINE float total(int t) const {
        __m128 sum = _mm256_extractf128_ps(each[t], 1);
        sum = _mm_add_ps(sum, _mm256_castps256_ps128(each[t]));
        sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        sum = _mm_add_ss(sum, _mm_movehdup_ps(sum));
        return _mm_cvtss_f32(sum);
    }
};

// The `part`th of eight numbers, for 32 products.
INLINE __m256i scale_of(__m256i eight_twice, int part) { return _mm256_shuffle_epi8(eight_twice, spread(part, part)); }

template <int T>
struct Q4_K {
    using block = block_q4_K;
    RowSums<T> sums;
    __m128 of_minima[T];

    INLINE Q4_K() {
        for (int t = 0; t < T; ++t) of_minima[t] = _mm_setzero_ps();
    }

    INLINE void add(const block & x, const Activations<T> & y) {
        const Parts parts(x.scales);
        const Factors dmin(y.d, -GGML_CPU_FP16_TO_FP32(x.dmin));
        for (int t = 0; t < T; ++t) {
            const __m128i products = _mm_madd_epi16(parts.minima, load_half(y.sums_of_32[t]));
            const __m128 factor = _mm256_castps256_ps128(dmin.of(t));
            of_minima[t] = _mm_fmadd_ps(factor, _mm_cvtepi32_ps(products), of_minima[t]);
        }
        const __m256i scales = twice(parts.scales);
        WholeSums<T> whole;
#pragma GCC unroll 8
        for (int part = 0; part < 8; ++part) whole.add(weights_of(x, part), scale_of(scales, part), y, 32 * part);
        sums.add(whole, Factors(y.d, GGML_CPU_FP16_TO_FP32(x.d)));
    }

    INLINE float total(int t) const {
        __m128 minima = _mm_add_ps(of_minima[t], _mm_movehl_ps(of_minima[t], of_minima[t]));
        minima = _mm_add_ss(minima, _mm_movehdup_ps(minima));
        return sums.total(t) + _mm_cvtss_f32(minima);
    }
};

template <int T>
struct Q5_K {
    using block = block_q5_K;
    RowSums<T> sums;
    float of_minima[T] = {};

    INLINE void add(const block & x, const Activations<T> & y) {
        const Parts parts(x.scales);
        const Factors dmin(y.d, -GGML_CPU_FP16_TO_FP32(x.dmin));
        for (int t = 0; t < T; ++t) {
            const __m128i products = _mm_madd_epi16(parts.minima, load_half(y.sums_of_32[t])), zero = _mm_setzero_si128();
            const __m128i total = _mm_hadd_epi32(_mm_hadd_epi32(products, zero), zero);
            of_minima[t] = std::fma(dmin.each[t], (float) _mm_cvtsi128_si32(total), of_minima[t]);  // as ggml is compiled
        }
        const __m256i scales = twice(parts.scales);
        WholeSums<T> whole;
#pragma GCC unroll 8
        for (int part = 0; part < 8; ++part) whole.add(weights_of(x, part), scale_of(scales, part), y, 32 * part);
        sums.add(whole, Factors(y.d, GGML_CPU_FP16_TO_FP32(x.d)));
    }

    INLINE float total(int t) const { return sums.total(t) + of_minima[t]; }
};

template <int T>
struct Q6_K {
    using block = block_q6_K;
    RowSums<T> sums;

    INLINE void add(const block & x, const Activations<T> & y) {
        const __m256i scales = _mm256_cvtepi8_epi16(load_half(x.scales));
        const __m256i halves[] = {twice(_mm256_castsi256_si128(scales)), twice(_mm256_extracti128_si256(scales, 1))};
        WholeSums<T> whole;
#pragma GCC unroll 8
        for (int part = 0; part < 8; ++part) {
            const int two = 2 * (part % 4);
            whole.add(weights_of(x, part), _mm256_shuffle_epi8(halves[part / 4], spread(two, two + 1)), y, 32 * part);
        }
        for (int t = 0; t < T; ++t) {  // the weights are stored 32 too large
            const __m256i of_16 = _mm256_madd_epi16(load(y.sums_of_16[t]), scales);
            whole.each[t] = _mm256_sub_epi32(whole.each[t], _mm256_slli_epi32(of_16, 5));
        }
        sums.add(whole, Factors(y.d, GGML_CPU_FP16_TO_FP32(x.d)));
    }

    INLINE float total(int t) const { return sums.total(t); }
};

// Some tokens of a product, with their activations laid out.
struct Group {
    int64_t first, size;
    size_t offset;
};

template <int T>
void lay_out(const Product & p, int64_t first, void * to) {
    auto * y = (Activations<T> *) to;
    for (int64_t i = 0; i < p.blocks; ++i) {
        for (int t = 0; t < T; ++t) {
            const block_q8_K & x = p.B[(first + t) * p.ldb + i];
            memcpy(y[i].q[t], x.qs, sizeof(x.qs));
            memcpy(y[i].sums_of_16[t], x.bsums, sizeof(x.bsums));
            const __m128i of_32 = _mm_hadd_epi16(load_half(x.bsums), load_half(x.bsums + 8));
            _mm_storeu_si128((__m128i *) y[i].sums_of_32[t], of_32);
            y[i].d[t] = x.d;
        }
        for (int t = T; t < MOST_TOKENS; ++t) y[i].d[t] = 0;
    }
}

// A function of its own for each size, or registers are shared out over all sizes at once.
template <template <int> class Quant, int T>
__attribute__((noinline)) void multiply_group(const Product & p, int64_t row, int64_t end, int64_t first, const void * laid_out) {
    const auto * y = (const Activations<T> *) laid_out;
    for (; row < end; ++row) {
        const auto * x = (const typename Quant<T>::block *) p.A + row * p.lda;
        Quant<T> quant;
        for (int64_t i = 0; i < p.blocks; ++i) {
            fetch_ahead(x + i + p.lda);
            quant.add(x[i], y[i]);
        }
        for (int t = 0; t < T; ++t) p.C[(first + t) * p.ldc + row] = quant.total(t);
    }
}

// Call `f` with the number as a constant, 1 to MOST_TOKENS.
template <int T = MOST_TOKENS, typename F>
void with_constant(int64_t number, F f) {
    if (number == T) {
        f(std::integral_constant<int, T>{});
    } else if constexpr (T > 1) {
        with_constant<T - 1>(number, f);
    }
}

// Tokens of one panel times all rows, in groups as equal as may be: nine tokens are five and four.
template <template <int> class Quant>
void multiply_panel(const Product & p, int64_t begin, int64_t end) {
    Group groups[PANEL / MOST_TOKENS];
    const int64_t n = end - begin, count = (n + MOST_TOKENS - 1) / MOST_TOKENS;
    size_t bytes = 0;
    for (int64_t g = 0; g < count; ++g) {
        const int64_t first = g * n / count, next = (g + 1) * n / count;
        groups[g] = {begin + first, next - first, bytes};
        with_constant(next - first, [&](auto size) { bytes += sizeof(Activations<size()>) * p.blocks; });
    }
    char * laid_out = scratch(bytes);
    for (int64_t g = 0; g < count; ++g) {
        with_constant(groups[g].size, [&](auto size) { lay_out<size()>(p, groups[g].first, laid_out + groups[g].offset); });
    }
    share_rows(p, [&](int64_t row, int64_t last) {
        for (int64_t g = 0; g < count; ++g) {
            with_constant(groups[g].size, [&](auto size) {
                multiply_group<Quant, size()>(p, row, last, groups[g].first, laid_out + groups[g].offset);
            });
        }
    });
}

template <template <int> class Quant>
void multiply(const Product & p) {
    for (int64_t begin = 0; begin < p.n; begin += PANEL) multiply_panel<Quant>(p, begin, std::min(p.n, begin + PANEL));
}

bool multiply(int type, const Product & p) {
    switch (type) {
        case GGML_TYPE_Q4_K: multiply<Q4_K>(p); return true;
        case GGML_TYPE_Q5_K: multiply<Q5_K>(p); return true;
        case GGML_TYPE_Q6_K: multiply<Q6_K>(p); return true;
        default: return false;
    }
}

std::atomic<int64_t> products_so_far{0};

// Tokens from which on the wide kernels multiply; 0 where no kernel here is wanted.
int64_t wide_from() {
    static const int64_t from = [] {
        const char * text = std::getenv("HOMESPEC_KERNELS");
        if (text != nullptr && strcmp(text, "0") == 0) return int64_t(0);
        return text != nullptr && strcmp(text, "exact") == 0 ? INT64_MAX : WIDE;
    }();
    return from;
}

}  // namespace
}  // namespace homespec

int64_t homespec_products(void) { return homespec::products_so_far; }

bool __wrap_llamafile_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
                            const void * A, int64_t lda, const void * B, int64_t ldb, void * C, int64_t ldc,
                            int Atype, int Btype, int Ctype) {
    using namespace homespec;
    if (n >= 2 && Btype == GGML_TYPE_Q8_K && Ctype == GGML_TYPE_F32 && wide_from() > 0) {
        const Product p = {params, m, n, k, A, lda, (const block_q8_K *) B, ldb, (float *) C, ldc};
        if (n < wide_from() ? multiply(Atype, p) : multiply_wide(Atype, p)) {
            if (params->ith == 0) ++products_so_far;
            return true;
        }
    }
    return __real_llamafile_sgemm(params, m, n, k, A, lda, B, ldb, C, ldc, Atype, Btype, Ctype);
}

#else

int64_t homespec_products(void) { return -1; }

bool __wrap_llamafile_sgemm(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
                            const void * A, int64_t lda, const void * B, int64_t ldb, void * C, int64_t ldc,
                            int Atype, int Btype, int Ctype) {
    return __real_llamafile_sgemm(params, m, n, k, A, lda, B, ldb, C, ldc, Atype, Btype, Ctype);
}

#endif
