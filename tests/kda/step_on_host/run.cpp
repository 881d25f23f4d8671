// decode_step.cu on threads of the CPU, one cluster after the other.
#include "decode_step.cu"

extern "C" void run(const Params* p, int clusters) {
    for (int i = 0; i < clusters; ++i) {
        Cluster all;
        std::vector<std::thread> threads;
        for (Block& one : all.blocks) {
            one.memory.assign(sizeof(Shared), 0xff);
            for (int w = 0; w < WARPS; ++w) one.warps.push_back(new std::barrier<>(32));
        }
        for (int t = 0; t < SPLIT * THREADS; ++t) {
            threads.emplace_back([&all, p, i, t] {
                cluster = &all;
                block = &all.blocks[t / THREADS];
                threadIdx.x = t % THREADS;
                blockIdx.x = i * SPLIT + t / THREADS;
                decode_step(*p);
            });
        }
        for (std::thread& thread : threads) thread.join();
        for (Block& one : all.blocks) {
            for (std::barrier<>* warp : one.warps) delete warp;
        }
    }
}
