// Does this compiler fill the AMX tile configuration that it then loads?
//
// llama.cpp's CPU backend writes a 64-byte structure on the stack and hands it to _tile_loadconfig.
// In gcc before 13.3 that intrinsic claims to read 8 bytes only, so the optimiser may drop the
// stores to the rest, and the first tile instruction dies of SIGILL. The code below has the shape of
// ggml-cpu/amx/mmq.cpp. Prints one word: absent, denied, sound or wrong; or dies of a signal.
#include <cstdio>

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__linux__)
#include <cstdint>
#include <immintrin.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

struct tile_config_t {
    uint8_t palette_id = 0;
    uint8_t start_row = 0;
    uint8_t reserved_0[14] = {0};
    uint16_t colsb[16] = {0};
    uint8_t rows[16] = {0};
};

// Kept apart from the tile instructions, as llama.cpp's kernels are: one of them in the same function
// touches all memory and would save the stores.
__attribute__((noinline)) static void load_tile_config() {
    static thread_local bool done = false;
    if (done) {
        return;
    }
    alignas(64) tile_config_t tc = {};
    tc.palette_id = 1;
    tc.rows[0] = 8;   tc.colsb[0] = 64;
    tc.rows[1] = 8;   tc.colsb[1] = 64;
    tc.rows[2] = 16;  tc.colsb[2] = 32;
    tc.rows[3] = 16;  tc.colsb[3] = 32;
    tc.rows[4] = 16;  tc.colsb[4] = 64;
    tc.rows[5] = 16;  tc.colsb[5] = 64;
    tc.rows[6] = 16;  tc.colsb[6] = 64;
    tc.rows[7] = 16;  tc.colsb[7] = 64;
    _tile_loadconfig(&tc);
    done = true;
}

// A is 16 rows x 32, B is 32 x 16 packed by fours, C = A B. Volatile, so that the data's own stores
// are not at stake here.
static volatile int8_t a[16][32];
static volatile int8_t b[8][64];
static volatile int32_t c[16][16];

static bool multiply_is_right() {
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < 32; k++) {
            a[i][k] = (int8_t) (i * 7 + k * 3 - 60);
            b[k / 4][4 * i + k % 4] = (int8_t) (k * 5 - i * 11);
        }
    }
    load_tile_config();
    _tile_loadd(0, b, 64);
    _tile_loadd(2, a, 32);
    _tile_zero(4);
    _tile_dpbssd(4, 2, 0);
    _tile_stored(4, c, 64);
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 16; j++) {
            int32_t sum = 0;
            for (int k = 0; k < 32; k++) {
                sum += a[i][k] * b[k / 4][4 * j + k % 4];
            }
            if (c[i][j] != sum) {
                return false;
            }
        }
    }
    return true;
}

int main() {
    const long request_permission = 0x1023, tile_data = 18;
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) {
        std::puts("denied");  // llama.cpp asks the same and goes without AMX then
        return 0;
    }
    bool right = false;
    std::thread([&] { right = multiply_is_right(); }).join();  // llama.cpp works in threads, too
    std::puts(right ? "sound" : "wrong");
    return 0;
}
#else
int main() {
    std::puts("absent");
    return 0;
}
#endif
