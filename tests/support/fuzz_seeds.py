"""First inputs for the fuzzers, those that once failed among them, and words that inputs are made of."""

import struct

_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'


def _gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM = _CHUNKED + _chunk(_EVENT) + _chunk(_USAGE) + b"0\r\n\r\n"
_RESPONSES = (
    _STREAM,
    _CHUNKED + _chunk(_EVENT),
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_USAGE) + _USAGE,
    b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n" + _EVENT,
    b"HTTP/1.1 503 X\r\nContent-Length: 10\r\n\r\nqueue full",
    b"HTTP/1.1 100 Continue\r\n\r\n" + _STREAM,
    _STREAM + _STREAM,  # nobody asked for the second
    _CHUNKED + _chunk(_EVENT * 40) + _chunk(_USAGE) + b"0\r\nX-Trailer: 1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + _EVENT,
    b"HTTP/1.1 204 No Content\r\n\r\n",
    # findings: sizes that overflow, negative sizes, NUL bytes, numbers without digits
    _CHUNKED + b"FFFFFFFFFFFFFFFF\r\nabcdef",
    _CHUNKED + b"1FFFFFFFFFFFFFFFF\r\nabcdef",
    _CHUNKED + b"\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: \0abcdefghi\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\ncontent-length: \r\n\r\n",
    b"HTTP/1.1 \r\n\r\n",
)
_SLOW_CLIENT_OF_A_HUNG_ENGINE = b"\x14\x01ping" + b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\nabcdefghijkl"
_DOCUMENTS = (
    b"powerband: deployment/1\nvariant: {source: x}\nengine: vllm\nconfig: {max_num_seqs: 4}\n",
    b"powerband: slo/1\nttft: {p50: 200ms, p95: 1s}\ntpot: {p95: 50ms}\n",
    b"powerband: workload/1\narrivals: {process: poisson, rate_per_s: 1}\nprompt: {shape: fixed, tokens: 4}\n"
    b"output: {shape: lognormal, median: 3, p95: 9}\n",
    b'{"powerband": "workload/1", "arrivals": {"process": "closed", "users": 2}, "dataset": {"path": "x"}}',
    b"powerband: inventory/1\nmachines: [{device: h100-sxm, count: 2}]\n",
    b"powerband: quality/1\n",
    b"powerband: tenants/1\n",
    b"powerband: fleet/1\n",
    b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\npowerband: slo/1\n",
    b"powerband: slo/1\n? [a]\n: b\n",
    b"powerband: slo/1\nx: !!float a\ny: !!timestamp b\nz: 99999999999999999999999\n",
)
_SIZES = {
    b"block_count": 2, b"embedding_length": 8, b"attention.head_count": 2, b"attention.head_count_kv": 1,
    b"feed_forward_length": 16, b"context_length": 4096, b"vocab_size": 9,
}  # fmt: skip
_GGUF = (
    b"GGUF" + struct.pack("<IQQ", 3, 1, 1 + len(_SIZES))
    + _gguf_string(b"general.architecture") + struct.pack("<I", 8) + _gguf_string(b"llama")
    + b"".join(_gguf_string(b"llama." + key) + struct.pack("<II", 4, size) for key, size in _SIZES.items())
    + _gguf_string(b"output.weight") + struct.pack("<IQQIQ", 2, 8, 8, 0, 0)
)  # fmt: skip
_CONFIG = (
    b'{"architectures": ["X"], "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9,'
    b' "intermediate_size": 16, "num_key_value_heads": 1, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}'
)
_METRICS = (
    b'vllm:num_requests_running{model_name="m"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    b"llamacpp:requests_processing 1\nllamacpp:prompt_tokens_total NaN\n\0"
    b'[{"n_ctx": 8, "is_processing": true, "n_prompt_tokens": 2}]'
)
_RESULTS = (
    b'v{"start_times": [0, 1], "ttfts": [0.1, 0.2], "itls": [[0.1], [0.1]], "input_lens": [3, 4],'
    b' "output_lens": [2, 2], "errors": ["", ""]}',
    b'v{"benchmarks": [{"requests": {"successful": [{"request_start_time": 1, "time_to_first_token_ms": 2,'
    b' "inter_token_latency_ms": 3, "request_latency": 4, "prompt_tokens": 5, "output_tokens": 6}]}}]}',
    b'v{"metadata": {"request_start_ns": 5}, "metrics": {"request_latency": {"value": 3}}}\n',
    b't{"timestamp": 1000, "input_length": 4, "output_length": 2, "hash_ids": [1, 2]}\n',
    b"cTIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    b'd{"messages": [{"role": "user", "content": "hi"}]}\n{"turns": ["a"]}\n{"conversations": [{"from": "human"}]}',
    b'q{"prompt": "2 + 2 =", "answer": "4", "check": "regex"}\n',
)
_REQUESTS = (
    b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": true}',
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}',
    b'{"model": "m", "prompt": ["a", "b"], "max_completion_tokens": 1}',
)
SEEDS: dict[str, tuple[bytes, ...]] = {
    "wire": tuple(bytes([how]) + response for how in (0, 1, 2) for response in _RESPONSES),
    "relay": (
        *(bytes([how, 1]) + b"ping" + response for how in (0, 1, 8, 16, 32) for response in _RESPONSES),
        _SLOW_CLIENT_OF_A_HUNG_ENGINE,
    ),
    "counting": (bytes(range(64)), b"\x02" + bytes(63), b"\xff" * 80, b"\x03" + b"\xff" * 90),
    "documents": _DOCUMENTS,
    "gguf": (_GGUF, _GGUF[:40]),
    "config": (_CONFIG, _CONFIG[:-1] + b', "layer_types": ["full_attention", "linear_attention"]}'),
    "metrics": (_METRICS,),
    "sse": tuple(bytes([how]) + response for how in (0, 1) for response in _RESPONSES),
    "results": _RESULTS,
    "requests": _REQUESTS,
}
_HTTP = (
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 503 X\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n", b"content-type: text/event-stream\r\n", b"\r\n\r\n", b"data: {", b"data: [DONE]\n",
    b'"content":"', b'"usage":', b'"prompt_tokens":', b'"completion_tokens":', b'"error":', b'"finish_reason":',
    b"FFFFFFFF", b"0\r\n\r\n", b"x-powerband-secret: hush\r\n",
)  # fmt: skip
WORDS: dict[str, tuple[bytes, ...]] = {
    "wire": _HTTP,
    "relay": _HTTP,
    "counting": (b"\xff\xff\xff\xff",),
    "documents": (b"powerband: ", b"&a ", b"*a", b"!!", b"- ", b"1e999", b"deployment/1", b"recipe/1", b"study/1"),
    "gguf": (b"GGUF\x03\x00\x00\x00", b"general.architecture", b"\x09\x00\x00\x00", b"llama.block_count"),
    "config": (b'"num_hidden_layers":', b'"text_config":', b'"quantization_config":', b"-1", b"1e999", b"null"),
    "metrics": (b"vllm:", b"llamacpp:", b"_total", b"NaN", b'{le="+Inf"}', b"\n"),
    "sse": _HTTP,
    "results": (b'"hash_ids":', b"null", b"-1", b"1e999", b'"turns":', b"[", b"{"),
    "requests": (b'"messages":', b'"content":', b"null"),
}
