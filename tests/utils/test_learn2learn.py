import importlib
import sys

import pytest

from l2l_niw.utils._learn2learn import NOTICE, import_learn2learn


@pytest.mark.parametrize("fails", [False, True])
def test_only_gyms_notice_is_left_out(monkeypatch, capsys, fails):
    def say(name):
        print(f"{NOTICE[0]} since 2022.\nsomething else\n{NOTICE[2]}.farama.org", file=sys.stderr)
        if fails:
            raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", say)
    if fails:
        with pytest.raises(ImportError, match="learn2learn"):
            import_learn2learn()
    else:
        import_learn2learn()
    assert capsys.readouterr().err == "something else\n"
