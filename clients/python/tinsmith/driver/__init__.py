"""Jobs from the inside: what a program that is the driver of one says and asks.

job = tinsmith.driver.current()
job.wait_ready(client, "qwen3-0.6b")
first = json.loads(job.state)["step"] if job.state else 0
for step in range(first, 100):
    ...
    job.report(step=step + 1, max_steps=100, metrics={"loss": loss})
    if job.should_stop:
        job.report(checkpoint=run.save_state(f"step-{step + 1}").result())
        job.save_state(json.dumps({"step": step + 1}).encode())
        sys.exit(job.stopped())
"""

from tinsmith.driver.agents import JobAgent, read_agents
from tinsmith.driver.context import Job, current

__all__ = ["Job", "JobAgent", "current", "read_agents"]
