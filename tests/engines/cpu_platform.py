"""Entry point of the test environments: vLLM 0.26 takes its CPU platform from a plug-in."""


def cpu() -> str:
    return "vllm.platforms.cpu.CpuPlatform"
