"""deploy/docs/security.md: its commands, run as they stand."""
import os
import re
import subprocess

from cluster import SLOW, Proc, clean_env, eventually
from wire import BUILD, ROOT


def test_the_page_works(models, tmp_path):
    sock = tmp_path / "redis.sock"
    redis = Proc("redis", ["redis-server", "--port", "0", "--unixsocket", str(sock), "--save", "", "--dir",
                           str(tmp_path)], tmp_path)
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "deploy/docs/security.md").read_text(), re.S)
    assert len(blocks) >= 6
    words = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    host = next((w for w in words if ":" not in w), "127.0.0.1")
    env = {**clean_env(), "MODEL": str(models("tiny")), "REDIS": f"unix:{sock}", "HOST": host,
           "PATH": f"{BUILD}:{os.environ['PATH']}"}
    script = "set -euo pipefail\nset -x\ntrap 'kill $(jobs -p) && wait' EXIT\n" + "\n".join(blocks)
    try:
        eventually(sock.exists, 10, "redis")
        out = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True,
                             timeout=240 * SLOW)
        logs = "".join(p.read_text() for p in (tmp_path / "baton-sec").glob("*.log"))
        assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-4000:] + logs[-4000:]
        assert '"text_completion"' in out.stdout and "baton_" in out.stdout
        assert not re.search("level=(warn|error)", logs), logs[-4000:]
    finally:
        redis.kill()
