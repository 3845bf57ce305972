// Stands in for an AMX unit: linked to the probe, it catches the SIGILL that ldtilecfg raises on a
// CPU without AMX, reads the 64 bytes the instruction points at and judges them as the CPU would.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ucontext.h>
#include <unistd.h>

// The probe asks the kernel for leave to use AMX; here there is none to give.
extern "C" long syscall(long, ...) { return 0; }

// x86 numbers its registers differently from ucontext.
static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// The memory operand of `ldtilecfg [base + disp]`, the only form a stack variable gets; or null.
static const uint8_t *operand(const uint8_t *code, const greg_t *registers) {
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 0x02 || code[2] != 0x78 || code[3] != 0x49) {
        return nullptr;
    }
    const int mode = code[4] >> 6;
    int base = code[4] & 7;
    const uint8_t *tail = code + 5;
    if (mode == 3 || (mode == 0 && base == 5)) {
        return nullptr;
    }
    if (base == 4) {
        if ((*tail >> 3 & 7) != 4) {
            return nullptr;  // an index register
        }
        base = *tail++ & 7;
    }
    base |= (code[1] & 0x20) ? 0 : 8;
    int32_t displacement = 0;
    if (mode == 1) {
        displacement = (int8_t) *tail;
    } else if (mode == 2) {
        std::memcpy(&displacement, tail, 4);
    }
    return (const uint8_t *) registers[REGISTERS[base]] + displacement;
}

static void on_illegal_instruction(int, siginfo_t *, void *context) {
    const greg_t *registers = ((ucontext_t *) context)->uc_mcontext.gregs;
    const uint8_t *config = operand((const uint8_t *) registers[REG_RIP], registers);
    const uint8_t rows[16] = {8, 8, 16, 16, 16, 16, 16, 16};
    const uint16_t columns[16] = {64, 64, 32, 32, 64, 64, 64, 64};
    if (config && config[0] == 1 && !std::memcmp(config + 16, columns, 32) && !std::memcmp(config + 48, rows, 16)) {
        (void) !write(1, "sound\n", 6);
        _exit(0);
    }
    std::signal(SIGILL, SIG_DFL);  // as on the real CPU: the instruction is run again, and kills
}

__attribute__((constructor)) static void install() {
    struct sigaction action = {};
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}
