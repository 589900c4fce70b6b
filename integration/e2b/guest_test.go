package e2b

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestGuest: what a sandbox's programs find in their machine, and what envd is there.
func TestGuest(t *testing.T) {
	c := newClient(t)
	sb := c.create(map[string]any{"envVars": map[string]string{"GREETING": "created"}})
	for _, test := range []struct {
		name string
		run  func(*client, sandbox)
	}{
		{"clock", clock}, {"users", whoRuns}, {"environment", environment}, {"groups", controlGroups}, {"kernel", kernel},
		{"shm", sharedMemory}, {"exec", fromOutside}, {"relay", relayed}, {"memory", shortMemory}, {"disk", fullDisk}, {"orphans", orphans},
		{"envd", envdKilled}, {"resumed", resumed},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := *c
			in.T = t
			test.run(&in, sb)
		})
	}
	c.killAll()
}

// root runs a command line as root, which has to succeed.
func (c *client) root(sb sandbox, command string) string {
	c.Helper()
	out, err := c.runAs(sb, "root", nil, command)
	if err != nil {
		c.Fatalf("%s: %v", command, err)
	}
	return strings.TrimSpace(out)
}

// clock: the sandbox has the host's time.
func clock(c *client, sb sandbox) {
	before := time.Now()
	said := c.root(sb, "date +%s.%N")
	after := time.Now()
	at, err := strconv.ParseFloat(said, 64)
	got := time.UnixMicro(int64(at * 1e6))
	if err != nil || got.Before(before.Add(-time.Second)) || got.After(after.Add(time.Second)) {
		c.Errorf("from %v to %v it was %v there, %v", before, after, got, err)
	}
}

func resumed(c *client, sb sandbox) {
	c.do("POST", "/sandboxes/"+sb.ID+"/pause", nil, nil, 204)
	c.do("POST", "/v2/sandboxes/"+sb.ID+"/connect", map[string]any{"timeout": 3600}, nil, 201)
	clock(c, sb)
}

func whoRuns(c *client, sb sandbox) {
	c.says(sb, "id -un; id -Gn; pwd; sudo -n id -un", "user\nuser sudo\n/home/user\nroot")
	if got := c.root(sb, "id -un; pwd; grep CapEff /proc/self/status; grep -E 'NoNewPrivs|Seccomp:' /proc/self/status"); got != "root\n/home/user\nCapEff:\t000001ffffffffff\nNoNewPrivs:\t0\nSeccomp:\t0" {
		c.Errorf("root is %q", got)
	}
	if out, err := c.runAs(sb, "nosuch", nil, "id"); err == nil || !strings.Contains(err.Error(), "nosuch") {
		c.Errorf("nobody's command: %q, %v", out, err)
	}
}

// environment: a request's variables go before the create's, and those before the image's; the identity is nobody's.
func environment(c *client, sb sandbox) {
	c.says(sb, "echo $GREETING $HOME $USER $E2B_SANDBOX $E2B_SANDBOX_ID", "created /home/user user true "+sb.ID)
	got, err := c.runAs(sb, "", map[string]string{"GREETING": "asked"}, "echo $GREETING; cat /run/e2b/.E2B_SANDBOX; echo; cat /run/e2b/.E2B_SANDBOX_ID; echo; test $(cat /run/e2b/.E2B_TEMPLATE_ID) = $E2B_TEMPLATE_ID")
	if err != nil || got != "asked\ntrue\n"+sb.ID+"\n" {
		c.Errorf("it says %q, %v", got, err)
	}
}

// controlGroups: root divides what the sandbox has, and a limit that it sets holds.
func controlGroups(c *client, sb sandbox) {
	got := c.root(sb, `cd /sys/fs/cgroup; for c in cpu io memory pids; do grep -qw $c cgroup.subtree_control || echo "no $c"; done
mkdir -p mine/inner && cd mine && echo 64M >memory.max && echo 32 >pids.max && echo '50000 100000' >cpu.max && echo '+memory +pids' >cgroup.subtree_control
(bash -c 'echo $$ >inner/cgroup.procs; exec python3 -c "len(b\"x\" * (200 << 20))"' || echo $?) 2>/dev/null
grep oom_kill memory.events; cd ..; rmdir mine/inner mine; cat /proc/1/cgroup /proc/$(pgrep -f '^cube-envd -sandbox')/cgroup /proc/self/cgroup`)
	if want := "137\noom_kill 1\n0::/envd\n0::/envd\n0::/user"; got != want {
		c.Errorf("%q, not %q", got, want)
	}
}

// kernel: what containers, VPNs and file systems of users' take from it is there.
func kernel(c *client, sb sandbox) {
	for what, command := range map[string]string{
		"overlay":         "cd $(mktemp -d) && mkdir lower upper work on && mount -t overlay none -o lowerdir=lower,upperdir=upper,workdir=work on && touch on/a && ls upper && umount on",
		"loop":            "cd $(mktemp -d) && truncate -s 16M disk && mke2fs -q disk && mkdir on && mount -o loop disk on && touch on/a && ls on/a >/dev/null && umount on && echo a",
		"FUSE":            `cd $(mktemp -d) && python3 -c 'import ctypes, os; f = os.open("/dev/fuse", os.O_RDWR); m = ctypes.CDLL(None).mount; print("a" if m(b"none", b".", b"fuse", 0, b"fd=%d,rootmode=40000,user_id=0,group_id=0" % f) == 0 else "no")' && umount -l .`,
		"bridge and veth": "ip link add br7 type bridge && ip link add veth7 type veth peer name eth7 && ip link set veth7 master br7 && ip link del veth7 && ip link del br7 && echo a",
		"tun":             "ip tuntap add mode tun name tun7 && ip link del tun7 && echo a",
		"net namespace":   "ip netns add n7 && ip -n n7 link set lo up && ip netns del n7 && echo a",
	} {
		if got, err := c.runAs(sb, "root", nil, command); err != nil || strings.TrimSpace(got) != "a" {
			c.Errorf("%s: %q, %v", what, got, err)
		}
	}
	c.says(sb, "unshare -Urm sh -c 'mount -t tmpfs none /mnt && id -u'", "0")
}

// sharedMemory: it is half of the machine's.
func sharedMemory(c *client, sb sandbox) {
	out := c.root(sb, "df -k --output=size /dev/shm | tail -n 1; sed -n 's/MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo")
	shm, all, _ := strings.Cut(out, "\n")
	a, aerr := strconv.ParseFloat(strings.TrimSpace(shm), 64)
	b, berr := strconv.ParseFloat(all, 64)
	if aerr != nil || berr != nil || math.Abs(a/b-0.5) > 0.01 {
		c.Errorf("KiB of /dev/shm and of the memory are %q", out)
	}
}

// fromOutside: who has the host gets into the sandbox without envd.
func fromOutside(c *client, sb sandbox) {
	if r := s.Cube("exec", sb.ID, "sh", "-c", "id -u; readlink /proc/1/exe; cat /run/e2b/.E2B_SANDBOX_ID"); r.Stdout != "0\n/.cube/cube-envd\n"+sb.ID {
		c.Errorf("cube exec: %q, %v", r.Stdout, r.Err)
	}
	if r := s.Ctr("task", "exec", "--exec-id", "from-outside", sb.ID, "id", "-u"); r.Stdout != "0\n" {
		c.Errorf("ctr task exec: %q, %v", r.Stdout, r.Err)
	}
}

// relayed: a server that listens to the sandbox alone is reached from outside.
func relayed(c *client, sb sandbox) {
	c.says(sb, "mkdir www; echo of the sandbox >www/index.html; setsid python3 -m http.server --directory www --bind 127.0.0.1 8123 >/dev/null 2>&1 & echo started", "started")
	s.Eventually(c, time.Minute, "an answer of its server", func() bool { return c.page(sb, 8123) == "of the sandbox\n" })
}

// page is what a server in a sandbox, or the proxy for it, answers.
func (c *client) page(sb sandbox, port int) string {
	c.Helper()
	req, err := http.NewRequest("GET", "http://"+s.Config.Proxy.Listen.String()+"/", nil)
	if err != nil {
		c.Fatal(err)
	}
	req.Host = fmt.Sprintf("%d-%s.sandbox.localhost", port, sb.ID)
	resp, err := c.http.Do(req)
	if err != nil {
		c.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		c.Fatal(err)
	}
	return string(b)
}

// shortMemory: who takes all of it is killed, and neither envd nor its init.
func shortMemory(c *client, sb sandbox) {
	const envd = "pgrep -f '^cube-envd -sandbox'; cat /proc/1/oom_score_adj /proc/$(pgrep -f '^cube-envd -sandbox')/oom_score_adj"
	before := c.root(sb, envd)
	if !strings.HasSuffix(before, "\n-1000\n-1000") {
		c.Errorf("envd and its init are %q", before)
	}
	out, err := c.run(sb, "exec python3 -c 'all = []\nwhile True: all.append(b\"x\" * (8 << 20))'")
	if err == nil || !strings.Contains(err.Error(), "killed") {
		c.Errorf("a command that takes all memory: %q, %v", out, err)
	}
	if after := c.root(sb, envd); after != before {
		c.Errorf("envd was %q and is %q", before, after)
	}
}

// upload writes a file by envd, and returns the answer's status and body.
func (c *client) upload(sb sandbox, path, content string) (int, string) {
	c.Helper()
	req, err := http.NewRequest("POST", "http://"+s.Config.Proxy.Listen.String()+"/files?path="+url.QueryEscape(path), strings.NewReader(content))
	if err != nil {
		c.Fatal(err)
	}
	routes(req.Header, sb)
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := c.http.Do(req)
	if err != nil {
		c.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		c.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// fullDisk: it is said so, and leaves a file as it was.
func fullDisk(c *client, sb sandbox) {
	if code, body := c.upload(sb, "kept", "as it was"); code != 200 {
		c.Fatal(code, body)
	}
	c.root(sb, "fallocate -l $(($(stat -f -c '%f * %S' /))) /fill 2>/dev/null; cat /dev/zero >/rest 2>/dev/null; sync; true")
	if code, body := c.upload(sb, "kept", strings.Repeat("more", 1<<20)); code != http.StatusInsufficientStorage || !strings.Contains(body, `"code":507`) {
		c.Errorf("on a full disk: %d %s", code, body)
	}
	c.says(sb, "cat kept", "as it was")
	c.root(sb, "rm /fill /rest")
	if code, body := c.upload(sb, "kept", "another"); code != 200 {
		c.Errorf("with room again: %d %s", code, body)
	}
}

// orphans: what is left by those who have started it doesn't stay when it has ended.
func orphans(c *client, sb sandbox) {
	c.says(sb, "for i in 1 2 3; do (setsid sh -c 'exit 3' &); done; sleep .2; for i in $(seq 100); do ps -e -o stat= | grep -q ^Z || break; sleep .1; done; ps -e -o stat= | grep -c ^Z; cat /proc/1/comm", "0\ncube-envd")
}

// envdKilled: another one comes, which knows what the former was told; what runs in the sandbox goes on.
func envdKilled(c *client, sb sandbox) {
	c.says(sb, "setsid sleep 8765 >/dev/null 2>&1 & echo done", "done")
	const envd = "pgrep -f '^cube-envd -sandbox'"
	before := c.root(sb, envd)
	if out, err := c.runAs(sb, "root", nil, "kill -KILL "+before); err == nil && out == "" {
		c.Log("its end was told before that of the connection")
	}
	s.Eventually(c, time.Minute, "another envd", func() bool {
		after, err := c.run(sb, envd)
		return err == nil && strings.TrimSpace(after) != before
	})
	c.says(sb, "echo $GREETING $E2B_SANDBOX_ID; pgrep -c -x -f 'sleep 8765'", "created "+sb.ID+"\n1")
	if out, err := c.run(sandbox{ID: sb.ID, Token: "guess"}, "id"); err == nil {
		c.Errorf("without the token it says %q", out)
	}
}
