"""The life of vLLM servers: what is started, by whom it is held, how it ends.

    specification   recipe -> argv, environment and fingerprint of a server (pure)
    arguments       the settings in vLLM's spelling
    parallelism     whether the target can be split as the recipe says
    cpu_binding     the cores of a machine without GPUs, shared out among the processes of a server
    server          open_server, stop_servers, running_servers: what the steps call
    starting        a record, then a watcher, then the server
    stopping        the end of a server, verified
    lease           who may use which GPUs: one lock per GPU, shared only for one and the same server
    record          what runs, on disk, so that later steps and other processes find it again
    process         identity of a process, and ending a whole family of them
    readiness       own process alive + healthy + serving under our name
    diagnosis       why a server died, from its log
    watcher         stops a server that nobody uses (a process of its own)
    overview        which servers run and who holds which GPUs, in words
    metrics         the server's own counters
    gpus            physical names of GPUs behind an outer CUDA_VISIBLE_DEVICES
    gpu_memory      is a stopped server's memory back, and is there room for the next server
    nvml            what the driver tells about the GPUs

A server outlasts the step that started it. It is used by holding the leases of its GPUs, and it is idle
when nobody holds them. All state is host-local and shared by all recipes, users and storage roots.
"""
