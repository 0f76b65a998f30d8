"""What is wrong with this machine, or with a recipe on it, each with what to do about it.

examination      all checks, one after the other; one that fails is a finding itself
finding          one line of the answer: ok, note or problem
gpus             driver and GPUs
partitions       free memory of the recipe's partitions, and who holds the rest
disks            storage root, /tmp, /dev/shm, caches
limits           open files, locked memory, processes
server_python    which vLLM the servers run, and what this project knows about it
architecture     whether vLLM gives hidden states of the target
ports            fixed ports of the recipe
leases           who holds which GPUs
leftovers        records, processes, shared memory and folders of servers that are gone
repair           ends and forgets what is left, where it is asked to; all else changes nothing
records          the records of servers, read without tidying them up
"""

from eagle3_pipeline.doctor.examination import examine
from eagle3_pipeline.doctor.finding import Finding, Mark
from eagle3_pipeline.doctor.repair import repair

__all__ = ["Finding", "Mark", "examine", "repair"]
