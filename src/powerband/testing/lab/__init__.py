"""The lab: hosts with GPUs that are simulated, for tests of everything but the engines' speed.

`lab.yaml` describes hosts. `host.build` writes the folder of a host: the files of `/proc` and `/sys` that Powerband
reads, a stand-in for NVIDIA's management library, and programs named `vllm` and `llama-server`. A process with the
environment that `host.environment` returns finds itself on that host. Results of the lab are rehearsed, not measured.
"""
