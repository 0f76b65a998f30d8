"""What assets are given: the storage root, the vLLM servers and the GPU partitions."""

from resources.gpu_partitions import GpuPartitions
from resources.storage import Storage
from resources.vllm_servers import VllmServers

__all__ = ["GpuPartitions", "Storage", "VllmServers"]
