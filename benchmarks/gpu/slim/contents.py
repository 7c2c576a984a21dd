"""What is carried, what the machine has, and what is left out with the reason."""

from __future__ import annotations

CARRIED = frozenset(
    """torch torchvision torch-c-dlpack-ext triton vllm ray transformers peft nvidia-nccl-cu13
    pydantic pydantic-core annotated-types typing-inspection typing-extensions jsonschema jsonschema-specifications
    referencing rpds-py math-verify latex2sympy2-extended antlr4-python3-runtime datasets dill multiprocess s3fs
    aiobotocore botocore jmespath aioitertools fsspec
    opencensus opencensus-context aiohttp-cors colorful smart-open google-api-core proto-plus googleapis-common-protos
    google-auth pyasn1 pyasn1-modules opentelemetry-api opentelemetry-sdk opentelemetry-proto
    opentelemetry-exporter-prometheus opentelemetry-semantic-conventions sniffio annotated-doc cachetools setproctitle
    msgspec distlib platformdirs
    openai httpx2 httpcore2 truststore jiter opentelemetry-exporter-http-transport opentelemetry-exporter-otlp
    opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
    opentelemetry-exporter-otlp-proto-http opentelemetry-semantic-conventions-ai fastapi starlette humming-kernels
    apache-tvm-ffi xgrammar pyzmq llguidance partial-json-parser pybase64 python-multipart cbor2 oss-harmony
    pydantic-extra-types pydantic-settings email-validator dnspython jsonpointer blake3 ijson depyf astor
    compressed-tensors lark interegular loguru mcp mcp-types outlines-core lm-format-enforcer uvicorn watchfiles
    websockets prometheus-fastapi-instrumentator python-json-logger httptools sse-starlette docstring-parser
    model-hosting-container-standards python-dotenv pyjwt nvtx""".split()  # noqa: SIM905 - a list would be a page
)
"""Distributions of requirements/: torch and vLLM, then rljob's own, Ray's and vLLM's. Packages that are imported for
models, devices and services of which no part makes use are left out (other kernels, sound and video, clouds)."""
LARGE = frozenset(("torch", "vllm", "triton", "ray", "nvidia-nccl-cu13"))
"""Of those, what takes minutes to fetch."""
MACHINE = """accelerate aiohttp anyio attr certifi click cloudpickle cv2 einops filelock google.protobuf grpc h11
    huggingface_hub jinja2 msgpack multidict networkx numpy nvidia packaging pandas PIL prometheus_client psutil pyarrow
    cpuinfo pynvml regex requests rich safetensors sentencepiece sympy tiktoken tokenizers torch tqdm triton typer
    urllib3 uvloop wrapt xxhash yaml yarl""".split()  # noqa: SIM905
"""Modules that are imported and not carried, and ``nvidia``, torch's CUDA 13 libraries: the machine's own are used."""

LEFT_OUT = {
    "tests": r"/tests?/",
    "what compiling against a package needs (torch's and Triton's headers stay, for torch.compile)": (
        r"\.(pxd|pyx|pyi|map|a)$|^(?!torch/include/|triton/).*\.(h|hpp|cuh?)$|^torch/(share|bin/protoc)"
        r"|^(tvm_ffi|nvtx|humming)/(.*/)?(include|share|cython)/"
    ),
    "what installers read": (
        r"\.dist-info/(RECORD|WHEEL|INSTALLER|LICENSE|NOTICE|AUTHORS|licenses/|sboms?/)|^[^/]*\.data/"
    ),
    "Ray's libraries that learn and serve, Java and C++": (
        r"^ray/(jars|rllib|llm|cpp|setup-dev|_private/(test_|ray_.*perf))"
    ),
    "vLLM's kernels for other models and number formats than bfloat16, and their tuned sizes": (
        r"^vllm/(vllm-rs|benchmarks/|third_party/(deep_gemm|flashmla|fmha_sm100)/"
        r"|_flashkda|_deepselect|_flashmla|_qutlass|vllm_flash_attn/_vllm_fa2"
        r"|model_executor/layers/(fused_moe|quantization/utils)/configs/)"
    ),
    "pictures": r"^torchvision/image\.so|^torchvision\.libs/",
    "services of AWS but S3 and signing in": (
        r"^botocore/data/(?!endpoints|partitions|sdk-default|_retry|s3/|sts/|sso/|sso-oidc/|signin/)"
    ),
    "Triton's profiler and AMD; ptxas and its like, of which the machine's are used": (
        r"^triton/(FileCheck|profiler/|plugins/|instrumentation/|tools/extra/|_C/libproton"
        r"|backends/amd/(include|lib)/|backends/nvidia/(bin|lib/cupti)/)"
    ),
}
"""Reason -> which files, by path in site-packages."""

KERNELS_LEFT_OUT = {
    "torch/lib/libtorch_cuda.so": r"(pytorch_flash|flash_fwd|flash_bwd).*(6half_t|kernel_traitsILi(96|192|256)E)"
    r"|fmha_cutlass.*_f16_",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": r"_(6half_t|12float_e4m3_t)EfNS_4arch"
    r"|Li(192|256|512)ENS_10bfloat16_tEfNS_4arch",
}
"""File -> mangled names of its kernels that no part calls: attention in half precision (parts compute in bfloat16), and
with heads of other sizes than the models' 64 and 128."""
