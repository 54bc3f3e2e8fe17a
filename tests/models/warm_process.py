"""A process that has imported transformers and forks for each script it receives to run. Not a test file.

Tests that are not about the start of a clean process use it instead of one, as the import takes most of its time.
Each line of stdin is {"command": [...], "cwd", "stderr"}; each of stdout the exit code. This package is never imported.
"""

import json
import os
import runpy
import sys
import traceback

for _name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_name] = "1"


def run(job):
    """In the fork: as `python -I script arguments` would."""
    import transformers.dynamic_module_utils
    import transformers.utils.hub

    os.chdir(job["cwd"])
    sys.stderr = open(job["stderr"], "w")  # noqa: SIM115  # until the fork ends
    for module in (transformers.utils.hub, transformers.dynamic_module_utils):  # read from the environment at import
        vars(module)["HF_MODULES_CACHE"] = os.path.join(job["cwd"], "modules")
    sys.argv = job["command"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
    return 0


def serve():
    """Fork, wait, answer, until stdin ends."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig  # noqa: F401  # what scripts import
    from transformers.models.llama import modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(run(json.loads(line)))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
