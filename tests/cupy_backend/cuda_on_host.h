// CUDA's launch model on one CPU thread, so that a kernel's very source runs where there is no card.
//
// Blocks run one after another. The threads of a block are fibers that take turns: each runs until
// its next barrier, and a round ends when all have reached one. A block in which some threads wait
// at a barrier that others never reach is reported, as it would hang on a device.
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

struct Fiber {
    ucontext_t start;
    jmp_buf place;
    bool started, ended;
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

static void __syncthreads() {
    if (!_setjmp(fibers[threadIdx.x].place)) _longjmp(scheduler, 1);
}

static void fiber() {
    for (;;) {
        body();
        fibers[threadIdx.x].ended = true;
        __syncthreads();
    }
}

template <class T> T __shfl_xor_sync(unsigned, T value, int step) {
    static T lanes[1024];
    lanes[threadIdx.x] = value;
    __syncthreads();
    T other = lanes[threadIdx.x ^ step];
    __syncthreads();
    return other;
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
        for (int t = 0; t < threads; ++t) fibers[t].ended = false;
        for (int waiting = threads; waiting;) {
            waiting = 0;
            for (int t = 0; t < threads; ++t) {
                resume(t);
                waiting += !fibers[t].ended;
            }
            if (waiting && waiting != threads) return blockIdx.x + 1;
        }
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
