"""A taskset that bundles a harness, which says more than the prompt."""

import httpx
import verifiers.v1 as vf


class BundledHarness(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_MCP = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        message = {"role": "user", "content": f"Bundled: {data.prompt}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            answer = await http.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": [message]},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(exit_code=int(answer.status_code != 200), stdout="", stderr="")


class Bundle(vf.Taskset[vf.Task]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt="Hello."), self.config.task)]


__all__ = ["Bundle", "BundledHarness"]
