// CUDA's launch model on one CPU thread, so that a kernel's very source runs where there is no card.
//
// Blocks run one after another. The threads of a block are fibers that take turns: each runs until
// its next barrier, and a round ends when all have reached one. A block in which some threads wait
// at a barrier that others never reach is reported, as it would hang on a device.
#include <ucontext.h>

#include <cmath>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

struct Dim { int x; };
Dim threadIdx, blockIdx, blockDim, gridDim;

#define __global__
#define __device__ static
#define __shared__ static
using std::exp;
using std::isinf;

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> ended;
static std::function<void()> body;
static long barriers;

static void __syncthreads() {
    ++barriers;
    swapcontext(&fibers[threadIdx.x], &scheduler);
}

template <class T> T __shfl_xor_sync(unsigned, T value, int step) {
    static T lanes[1024];
    lanes[threadIdx.x] = value;
    __syncthreads();
    T other = lanes[threadIdx.x ^ step];
    __syncthreads();
    return other;
}

static void fiber() {
    body();
    ended[threadIdx.x] = 1;
    swapcontext(&fibers[threadIdx.x], &scheduler);
}

// 0, or the number of a block whose threads did not all reach the same barriers, plus 1.
static int run_grid(int blocks, int threads) {
    static std::vector<std::vector<char>> stacks;
    stacks.resize(threads, std::vector<char>(1 << 16));
    gridDim.x = blocks, blockDim.x = threads;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        fibers.assign(threads, ucontext_t());
        ended.assign(threads, 0);
        for (int t = 0; t < threads; ++t) {
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = stacks[t].data();
            fibers[t].uc_stack.ss_size = stacks[t].size();
            makecontext(&fibers[t], fiber, 0);
        }
        for (bool alive = true; alive;) {
            int waiting = 0;
            for (int t = 0; t < threads; ++t) {
                threadIdx.x = t;
                swapcontext(&scheduler, &fibers[t]);
                waiting += !ended[t];
            }
            if (waiting && waiting != threads) return block + 1;
            alive = waiting;
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
