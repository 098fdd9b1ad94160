"""Dockerfiles in the manner of public task environments, and generated ones. All are built over the same base.

They use only what the test's base has: no network, and instructions that buildah 1.28 knows.
"""

from __future__ import annotations

import io
import random
import re
import tarfile
import zipfile
from pathlib import Path

from agent_runtime.dockerfiles.parse import parse

_WHEEL = "tool-1.0-py3-none-any.whl"


def write_corpus_context(folder: Path) -> None:
    """Write the context that all Dockerfiles of the corpus share."""
    for path, content in {
        "requirements.txt": "tool==1.0\n",
        "app/main.py": "print('main')\n",
        "app/lib/helper.py": "VALUE = 1\n",
        "app/lib/data.json": "{}\n",
        "app/.env": "KEY=value\n",
        "app/notes.tmp": "ignored\n",
        "data/logs/2024-01.log": "a\nb\n",
        "data/logs/2024-02.log": "c\n",
        "data/with blank/ü.txt": "odd\n",
        "config/service.conf": "[service]\nport = 80\n",
        "config/crontab": "* * * * * root true\n",
        "scripts/start.sh": "#!/bin/sh\nexec sleep 1\n",
        "scripts/check.sh": "#!/bin/sh\nexit 0\n",
        "package/DEBIAN/control": "Package: sample\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n",
        "package/DEBIAN/postinst": (
            "#!/bin/sh\nset -e\n[ -e /dev/null ] && [ -r /proc/self/status ]\n"
            "adduser --system --group --home /var/lib/sample sample >/dev/null 2>&1 || useradd -r -d /var/lib/sample sample"
            "\n"
            "install -d -o sample -m 2750 /var/lib/sample\nln -sf /etc/sample.conf /var/lib/sample/conf\n"
        ),
        "package/DEBIAN/prerm": "#!/bin/sh\nrm -f /var/lib/sample/conf\n",
        "package/DEBIAN/conffiles": "/etc/sample.conf\n",
        "package/etc/sample.conf": "sample\n",
        "package/usr/bin/sample": "#!/bin/sh\necho sample\n",
        ".dockerignore": "**/*.tmp\n.git\n!keep.tmp\n",
        "keep.tmp": "kept\n",
        ".git/config": "[core]\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    for entry in [folder, *folder.rglob("*")]:
        is_program = entry.parent.name in ("bin", "scripts") or entry.name in ("postinst", "prerm")
        entry.chmod(0o755 if entry.is_dir() or is_program else 0o644)
    (folder / "scripts/check.sh").chmod(0o644)
    (folder / "app/latest").symlink_to("lib/data.json")
    (folder / "app/broken").symlink_to("/opt/nothing")
    (folder / "config/logs").symlink_to("../data/logs")
    with zipfile.ZipFile(folder / _WHEEL, "w") as wheel:
        wheel.writestr("tool.py", "def run(): print('tool')\n")
        wheel.writestr("tool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
        wheel.writestr("tool-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tool-1.0.dist-info/entry_points.txt", "[console_scripts]\ntool = tool:run\n")
        wheel.writestr("tool-1.0.dist-info/RECORD", "")
    with tarfile.open(folder / "site.tar.gz", "w:gz") as tar:
        for name, kind, mode in (
            ("site", tarfile.DIRTYPE, 0o750),
            ("site/index.html", tarfile.REGTYPE, 0o644),
            ("site/run", tarfile.REGTYPE, 0o4755),
            ("site/link", tarfile.SYMTYPE, 0o777),
            ("site/hard", tarfile.LNKTYPE, 0o644),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid, member.gid = kind, mode, 33, 34
            member.linkname = {"site/link": "index.html", "site/hard": "site/index.html"}.get(name, "")
            page = b"page\n" if kind == tarfile.REGTYPE else b""
            member.size = len(page)
            tar.addfile(member, io.BytesIO(page))
    for file in (_WHEEL, "site.tar.gz"):
        (folder / file).chmod(0o644)


CORPUS = {
    "application": r"""
        FROM debian:12
        ENV DEBIAN_FRONTEND=noninteractive \
            PYTHONUNBUFFERED=1 APP_HOME=/srv/app
        LABEL maintainer="a" version="1"
        WORKDIR $APP_HOME
        COPY requirements.txt ./
        COPY app/ .
        COPY scripts/*.sh /usr/local/bin/
        RUN chmod +x /usr/local/bin/*.sh && mkdir -p logs /logs/verifier && chmod -R 777 logs
        EXPOSE 80 443/udp
        HEALTHCHECK --interval=5s CMD /usr/local/bin/check.sh
        ENTRYPOINT ["/usr/local/bin/start.sh"]
        CMD ["--serve"]
    """,
    "script without x bit": r"""
        FROM debian:12
        WORKDIR /app
        COPY scripts/check.sh /app/check.sh
        RUN test ! -x check.sh && chown nobody:nogroup check.sh && chmod 000 check.sh
    """,
    "whole context": """
        FROM debian:12
        WORKDIR /work
        COPY . .
        RUN rm -rf package && find . -name '*.log' -exec chmod 600 {} +
    """,
    "links of the context": """
        FROM debian:12
        COPY config /etc/service
        COPY config/logs /var/service/logs
        COPY app/latest /latest.json
        RUN cp -a /etc/service /copy && cp -rL /var/service/logs /plain
    """,
    "user of an earlier step": r"""
        FROM debian:12
        ARG UID=1500
        RUN groupadd -g 1600 staffers && useradd -m -u $UID -g staffers -s /bin/bash -c 'A B' agent \
            && echo 'agent ALL=(ALL) NOPASSWD:ALL' > /etc/agent.sudoers && chmod 0440 /etc/agent.sudoers
        USER agent
        WORKDIR /home/agent/project
        WORKDIR deep/er
        WORKDIR /home/agent/project
        RUN id -un > ~/who; echo "$HOME" > ~/home; umask > ~/umask
        COPY --chown=agent:staffers app /home/agent/app
        COPY app/main.py /home/agent/of-root.py
        USER agent:nogroup
        RUN touch ~/grouped
        USER 1500
        RUN touch /home/agent/numbered; mkdir ~/app/new
        USER root
        RUN usermod -aG staffers nobody && passwd -l agent && chown -R agent /home/agent/project
    """,
    "package with scripts": r"""
        FROM debian:12
        COPY package /build/package
        RUN printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
        RUN dpkg-deb --build --root-owner-group /build/package /build/sample.deb && dpkg -i /build/sample.deb \
            && rm -rf /build /var/log/dpkg.log /var/lib/dpkg/*-old
        RUN sample > /said && echo changed >> /etc/sample.conf
    """,
    "package removed": r"""
        FROM debian:12
        COPY package /build
        RUN dpkg-deb --build --root-owner-group /build /sample.deb && dpkg -i /sample.deb
        RUN dpkg --purge sample && rm -rf /build /sample.deb /var/log/dpkg.log /var/lib/dpkg/*-old
    """,
    "virtual environment": rf"""
        FROM debian:12
        RUN python3 -m venv --without-pip /opt/venv
        ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv PYTHONDONTWRITEBYTECODE=1
        COPY {_WHEEL} /tmp/
        RUN python3 -m zipfile -e /tmp/{_WHEEL} $(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') \
            && rm /tmp/{_WHEEL} && python -c 'import tool; tool.run()' > /said
    """,
    "shell options": r"""
        FROM debian:12
        SHELL ["/bin/bash", "-o", "pipefail", "-euc"]
        RUN echo one | tee /one > /dev/null; [[ -e /one ]]
        RUN set -x; for name in a b c; do echo "$name" > /list-$name; done; \
            (cd /usr && ls) | sort | head -n 3 > /sorted
        SHELL ["/usr/bin/python3", "-c"]
        RUN open("/python", "w").write("x" * 10)
        SHELL ["/bin/sh", "-c"]
        RUN echo "$0" > /shell; exec true
    """,
    "shell replaced": """
        FROM debian:12
        RUN rm /bin/sh && ln -s /bin/bash /bin/sh
        RUN [[ a == a ]] && echo $BASH_VERSION > /version
    """,
    "arguments": r"""
        ARG TAG=12
        ARG UNUSED
        FROM debian:${TAG} AS first
        ARG TAG
        ARG NAME="a b" QUOTED='$TAG' LATE
        ENV COMBINED="${NAME}-${TAG:-none}-${LATE:-late}" ESCAPED=\$TAG
        ENV ONE one two   three
        RUN echo "$NAME|$QUOTED|$LATE|$COMBINED|$ESCAPED|$ONE|${UNUSED:-unset}" > /variables
        FROM first
        RUN echo "$NAME|$COMBINED" > /inherited
    """,
    "quotes and continuation": r"""
        # a comment
        FROM debian:12
        RUN printf '%s\n' 'single "double" \\ back' "double 'single' \$HOME" \

            # a comment inside
            'last' > /quoted
        RUN ["printf", "[%s]", "exec form", "$HOME"]
        RUN echo 'id,status\n1,ok' > /escapes; echo "tab	inside" >> /escapes
        ENV GREETING="hello \"world\"" PATHS=a\ b
        RUN echo "$GREETING $PATHS" > /environment
    """,
    "odd names": r"""
        FROM debian:12
        COPY ["data/with blank", "/with blank/"]
        RUN mkdir -p "/\\tests" '/a b' && touch "/\\tests/x" "/a b/\"q\"" /a\ b/-dash "/a b/*" "$(printf '/a b/\377')" \
            "/a b/$(printf 'n%.0s' $(seq 200))"
        RUN rm "/a b/*" && mv "/a b" "/c d"
    """,
    "setuid and sticky": """
        FROM debian:12
        RUN cp /usr/bin/id /usr/local/bin/suid && chmod 6755 /usr/local/bin/suid && chown 33:33 /usr/local/bin/suid
        RUN mkdir -m 1777 /shared && mkdir -m 2770 /setgid && chgrp 33 /setgid && touch /setgid/inherits
        RUN chmod u+s /usr/local/bin/suid && chmod g-s /setgid && chmod +t /srv
    """,
    "capabilities": r"""
        FROM debian:12
        RUN cp /usr/bin/id /usr/local/bin/capable && python3 -c \
            'import os; os.setxattr("/usr/local/bin/capable", \
            "security.capability", b"\1\0\0\2\0\x20" + bytes(14))'
        RUN cp -a /usr/local/bin/capable /usr/local/bin/kept && mv /usr/local/bin/capable /opt/moved
    """,
    "hard links": """
        FROM debian:12
        RUN mkdir /links && echo one > /links/a && ln /links/a /links/b && ln /links/a /elsewhere \\
            && ln /links/a /links/c && ln /etc/passwd /links/passwd \\
            && cp -al /links /copies && rm /copies/a && echo more >> /copies/passwd
        RUN rm /links/a
    """,
    "sparse and large": r"""
        FROM debian:12
        RUN truncate -s 300M /sparse && printf x | dd of=/sparse bs=1 seek=1000000 conv=notrunc status=none
        RUN head -c 20000000 /dev/zero | tr '\0' 'a' > /large && split -b 1M /large /part-
        RUN truncate -s 0 /large && rm /part-*
    """,
    "many files": """
        FROM debian:12
        RUN mkdir /many && cd /many && for d in $(seq 40); do mkdir $d; for f in $(seq 50); do echo $f > $d/$f; done; done
        RUN find /many -name '1*' -delete; chown -R 5:6 /many/2*
        RUN rm -rf /many/3* && mkdir /many/30 && chmod -R o-rwx /many
    """,
    "deletions of the base": """
        FROM debian:12
        RUN rm -rf /usr/share/doc /usr/share/man /usr/share/locale /var/lib/apt/lists/* /var/cache/*
        RUN rm /etc/motd /etc/issue* && rmdir /media /mnt
        RUN mkdir -p /usr/share/doc/new && touch /usr/share/doc/new/file
        RUN rm -rf /usr/share/doc
    """,
    "deletion and creation in one step": """
        FROM debian:12
        RUN rm -rf /usr/share/doc && mkdir /usr/share/doc && touch /usr/share/doc/only
        RUN rm /etc/issue && mkdir /etc/issue && rm -rf /opt && ln -s srv /opt
        RUN rm -rf /etc/skel && echo file > /etc/skel && rm -r /var/opt && mkfifo /var/opt
        RUN rm /etc/skel && mkdir -m 700 /etc/skel && chown 9 /etc/skel
    """,
    "replaced folders": """
        FROM debian:12
        RUN mv /usr/share/doc /usr/share/doc.old && mkdir /usr/share/doc && mv /usr/share/doc.old /usr/share/doc/old
        RUN mv /etc/apt /apt && ln -s /apt /etc/apt
        RUN cp -a /etc/cron.d /etc/cron.new && rm -rf /etc/cron.d && mv /etc/cron.new /etc/cron.d
        RUN rm /etc/apt && mv /apt /etc/apt
    """,
    "copies of links": """
        FROM debian:12 AS made
        RUN mkdir -p /out/bin /out/lib && echo lib > /out/lib/lib.so.1 && ln -s lib.so.1 /out/lib/lib.so \
            && ln /out/lib/lib.so.1 /out/lib/same && ln -s /out/lib /out/current && chmod 4711 /out/lib/same \
            && chown -Rh 44:45 /out
        FROM debian:12
        COPY --from=made /out /opt/out
        COPY --from=made /out/lib/lib.so /single
        COPY --from=made /out/current /followed
        COPY --from=made --chown=root:adm /out/lib/ /owned/
        COPY --from=made /out/lib/*.so* /usr/lib/
        COPY --from=made /etc/debian_version /usr/bin/env /both/
    """,
    "destinations": """
        FROM debian:12
        RUN mkdir -p /real/inner && ln -s real /alias && ln -s /real/inner /deep && ln -s /not/there /dangling
        COPY app/main.py /alias/
        COPY app/lib /deep
        COPY app/main.py /real/inner/helper.py
        WORKDIR /alias/inner
        COPY app/main.py renamed.py
        COPY app/main.py ../up.py
        COPY app/lib ./lib/
        COPY config/service.conf config/crontab /new/deep/folder/
    """,
    "copy onto other kinds": """
        FROM debian:12
        RUN mkdir /folder && touch /folder/kept && chmod 700 /folder && echo long content > /file && chmod 600 /file
        COPY app/main.py /file
        COPY app/lib /folder
        COPY data /etc/apt
        COPY config/service.conf /etc/passwd-
    """,
    "archive": """
        FROM debian:12
        ADD site.tar.gz /var/www/
        COPY site.tar.gz /archives/
        ADD app/main.py /plain/
        RUN mkdir /by-hand && tar -xf /archives/site.tar.gz -C /by-hand && rm -r /archives
    """,
    "mounts": """
        FROM debian:12 AS source
        RUN mkdir /source && echo built > /source/result
        FROM debian:12
        RUN --mount=type=bind,from=source,source=/source,target=/srv/in cp /srv/in/result /result
        RUN --mount=type=cache,target=/srv/cache touch /srv/cache/x && touch /with-cache
        RUN --mount=type=tmpfs,target=/srv/scratch touch /srv/scratch/x && touch /with-tmpfs
    """,
    "stages by number and name": """
        FROM debian:12
        RUN echo zero > /zero
        FROM debian:12 AS unused
        RUN echo unused
        FROM debian:12 AS second
        COPY --from=0 /zero /copied
        FROM second
        COPY --from=second /copied /again
    """,
    "trigger": """
        FROM debian:12 AS parent
        ENV KIND=parent
        ONBUILD RUN echo "$KIND" > /triggered
        ONBUILD COPY app/main.py /triggered.py
        RUN test ! -e /triggered
        FROM parent
        RUN cat /triggered > /seen
    """,
    "temporary files": """
        FROM debian:12
        RUN mkdir /var/run/sshd && echo 1 > /run/daemon.pid && mkdir -p /run/lock/own
        WORKDIR /tmp
        COPY app/main.py /tmp/build/
        RUN cp build/main.py /kept.py && rm -rf /tmp/build && mkdir /tmp/left && echo x > /tmp/left/x
        RUN cat /tmp/left/x > /seen; echo y > /var/tmp/y
    """,
    "times": """
        FROM debian:12
        COPY app /app
        RUN find /app -type f -exec touch -t 202001010000.00 {} + && touch -d @0 /app
        RUN test "$(stat -c %Y /app/main.py)" = 1577836800
    """,
    "umask and default modes": """
        FROM debian:12
        RUN umask 077 && mkdir /private && touch /private/file
        RUN umask > /umask; touch /default; mkdir /default-folder; su nobody -s /bin/sh -c 'touch /var/tmp/of-nobody'
    """,
    "system configuration": r"""
        FROM debian:12
        RUN ln -snf /usr/share/zoneinfo/Etc/UTC /etc/localtime && echo Etc/UTC > /etc/timezone
        RUN sed -i 's/^root:x/root:*/' /etc/passwd && sed -i -E 's|bookworm|stable|g' /etc/apt/sources.list
        RUN update-alternatives --install /usr/bin/editor editor /usr/bin/env 10 \
            && rm /var/log/alternatives.log
        RUN mkdir -p /etc/systemd/system/multi-user.target.wants \
            && ln -s /lib/systemd/system/x.service /etc/systemd/system/multi-user.target.wants/x.service
        COPY config/crontab /etc/cron.d/task
        RUN chmod 0644 /etc/cron.d/task && ldconfig && rm -f /var/cache/ldconfig/aux-cache
        RUN localedef -i C -f UTF-8 /usr/lib/locale/own 2>/dev/null || true
    """,
    "processes left behind": """
        FROM debian:12
        RUN sleep 100 & echo $! > /dev/null; nohup sleep 100 >/dev/null 2>&1 & touch /background
        RUN touch /next
    """,
    "extended attributes": """
        FROM debian:12
        RUN touch /f && python3 -c 'import os; os.setxattr("/srv", "user.a", b"1"); os.setxattr("/f", "user.b", b"2" * 100)'
        RUN cp --preserve=xattr /f /g && python3 -c 'import os; os.removexattr("/f", "user.b")'
    """,
}
"""Dockerfiles by their subject."""


def generated(seed: int) -> str:
    """Return a Dockerfile of random changes in a few paths, so that the changes meet each other."""
    chance = random.Random(seed)
    tops = ("/g/a", "/g/b", "/g/c", "/etc/apt", "/etc/cron.d", "/usr/share/doc/apt")

    def path() -> str:
        return "/".join([chance.choice(tops), *chance.choices("xyz", k=chance.randint(0, 2))])

    def change() -> str:
        one, two, number = path(), path(), chance.randint(0, 99)
        mode = chance.choice(("600", "755", "2750", "1777", "4711", "000"))
        return chance.choice(
            (
                f"mkdir -p {one}",
                # Not into a fifo, because opening it waits for a reader.
                f"mkdir -p $(dirname {one}) && test ! -p {one} && echo {number} > {one}",
                f"test -p {one} || echo {number} >> {one}",
                f"rm -rf {one}",
                f"rm -rf {one} && mkdir -p {one}",
                f"rm -rf {one}/* && touch {one}/{number}",
                f"rm -rf {one}; mv {two} {one}",
                f"mv {one} {two}",
                f"ln {one} {two}",
                f"ln -sfn {one} {two}",
                f"cp -a {one} {two}",
                f"chmod {mode} {one}",
                f"chown -h {number}:{number + 1} {one}",
                f"truncate -s {number * 1000} {one}",
                f"mkfifo {one}",
            )
        )

    lines = ["FROM debian:12 AS first", "RUN mkdir -p /g/a /g/b"]
    for number in range(chance.randint(4, 8)):
        kind = chance.random()
        if kind < 0.7:
            lines.append(f"RUN {'; '.join(change() for _ in range(chance.randint(1, 6)))}; true")
        elif kind < 0.8:
            lines.append(f"COPY --chown={number}:{number} app /copied/{chance.choice('xyz')}")
        elif kind < 0.9:
            lines.append(f"COPY data/logs/*.log scripts /copied/{chance.choice('xyz')}/")
        else:
            lines.append(f"WORKDIR /g/work/{chance.choice('xyz')}")
    lines += ["RUN true", "FROM first", "COPY --from=first /g /from"]
    return "\n".join([*lines, ""])


_NEEDS_NETWORK = re.compile(
    r"\b(apt|apt-get|add-apt-repository|apk|dnf|yum|pip|pip3|uv|conda|npm|npx|yarn|gem|cargo|curl|wget)\b"
    r"|\bgit clone\b|\bgo (get|install)\b"
)


def offline(text: str, base: str) -> str:
    """Return a Dockerfile over `base`, without the RUN instructions that seem to need a network."""
    parsed, lines = parse(text), text.splitlines()
    stages = {stage.start.name for stage in parsed.stages}
    starts = sorted(
        line for stage in parsed.stages for line in (stage.start.line, *(found.line for found in stage.instructions))
    )
    kept = lines[: starts[0] - 1]
    for start, end in zip(starts, [*(line - 1 for line in starts[1:]), len(lines)], strict=True):
        instruction = "\n".join(lines[start - 1 : end])
        name, _, rest = instruction.partition(" ")
        if name.upper() == "RUN" and _NEEDS_NETWORK.search(rest):
            continue
        if name.upper() == "FROM":
            words = [word for word in rest.split() if not word.startswith("--platform")]
            instruction = " ".join(["FROM", words[0] if words[0].lower() in stages else base, *words[1:]])
        kept.append(instruction)
    return "\n".join([*kept, ""])
