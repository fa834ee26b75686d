"""One engine over several processes: a base model larger than a device, and full training of it.

`process_group` sets the ranks up; `leader_commands` lets rank 0 decide and the others follow;
`sharded_engine` is the engine that a trainer drives. Below it, two kinds of runs are computed in
two ways:

* adapter runs, by `sharded_passes`: microbatches are spread over the ranks, and every rank keeps
the whole arena. The base model is either whole on each rank or gathered layer by layer
(`sharded_base`, `sharded_decoder`);
* full-parameter runs, by `fsdp_runs`: FSDP2 over the transformers module.
"""
