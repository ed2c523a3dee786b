// CUDA's launch model on one CPU thread, so that a kernel's very source runs where there is no card.
//
// Blocks run one after another. The threads of a block are fibers. A warp runs alone, its threads in
// turns from shuffle to shuffle, until all of it stands at a barrier; then the next warp does, so that
// a barrier that is missing between warps shows. Where some threads wait at a barrier that others
// never reach, the block is reported, as it would hang on a device.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <functional>
#include <utility>

struct Dim { int x; };
Dim threadIdx, blockIdx, blockDim, gridDim;

#define __global__
#define __device__ static
#define __shared__ static
using std::exp;
using std::isinf;

enum Stop { SHUFFLE, BARRIER, END };

struct Fiber {
    ucontext_t start;
    jmp_buf place;
    bool started;
    Stop stop;
    char stack[1 << 15];
};
static Fiber fibers[1024];
static jmp_buf scheduler;
static std::function<void()> body;

// Only the first entry needs the slow ucontext; from there on a jump does, without system calls.
static void resume(int thread) {
    threadIdx.x = thread;
    if (_setjmp(scheduler)) return;
    if (fibers[thread].started) _longjmp(fibers[thread].place, 1);
    fibers[thread].started = true;
    setcontext(&fibers[thread].start);
}

static void wait(Stop stop) {
    fibers[threadIdx.x].stop = stop;
    if (!_setjmp(fibers[threadIdx.x].place)) _longjmp(scheduler, 1);
}

static void __syncthreads() { wait(BARRIER); }

static void fiber() {
    for (;;) {
        body();
        wait(END);
    }
}

template <class T> T __shfl_xor_sync(unsigned, T value, int step) {
    static T lanes[1024];
    lanes[threadIdx.x] = value;
    wait(SHUFFLE);
    T other = lanes[threadIdx.x ^ step];
    wait(SHUFFLE);
    return other;
}

// Where threads first to last stand once none of them can go on alone; SHUFFLE if they part.
static Stop advance(int first, int last) {
    do {
        for (int t = first; t < last; ++t) resume(t);
        for (int t = first; t < last; ++t)
            if (fibers[t].stop != fibers[first].stop) return SHUFFLE;
    } while (fibers[first].stop == SHUFFLE);
    return fibers[first].stop;
}

// 0, or the number of a block whose threads did not all reach the same barriers, plus 1.
static int run_grid(int blocks, int threads) {
    for (int t = 0; t < threads; ++t) {
        Fiber& f = fibers[t];
        if (f.started) continue;
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack;
        f.start.uc_stack.ss_size = sizeof f.stack;
        makecontext(&f.start, fiber, 0);
    }
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        Stop all;
        do {
            all = advance(0, 32);
            for (int t = 32; t < threads; t += 32)
                if (advance(t, t + 32) != all) return blockIdx.x + 1;
        } while (all == BARRIER);
        if (all != END) return blockIdx.x + 1;
    }
    return 0;
}

// Arguments come as cuLaunchKernel takes them: an array of pointers to values.
template <class... A, std::size_t... I>
static int launch(void (*kernel)(A...), int blocks, int threads, void** args,
                  std::index_sequence<I...>) {
    body = [=] { kernel(*static_cast<A*>(args[I])...); };
    return run_grid(blocks, threads);
}

template <class... A>
static int launch(void (*kernel)(A...), int blocks, int threads, void** args) {
    return launch(kernel, blocks, threads, args, std::index_sequence_for<A...>());
}

#define HOST_LAUNCH(name)                                                         \
    extern "C" int launch_##name(int blocks, int threads, void** args) {          \
        return launch(name, blocks, threads, args);                               \
    }
