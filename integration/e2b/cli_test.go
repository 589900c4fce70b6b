package e2b

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/sdks"
	"github.com/cubesandbox/cube/integration/stack"
)

// cli is E2B's command line for a user who has a key and has never logged in.
type cli struct {
	*testing.T
	key, home string
}

func newCLI(t *testing.T) *cli { return &cli{t, key(t, ""), t.TempDir()} }

// command is one of the command line's.
func (c *cli) command(args ...string) *exec.Cmd {
	c.Helper()
	script := sdks.Path(c.T, "sdk/node_modules/@e2b/cli/dist/index.js")
	cmd := byHeaders(c.T, s.Host.Command(sdks.Path(c.T, "sdk/node"), append([]string{script, "sandbox"}, args...)...))
	cmd.Env = append(cmd.Env, "HOME="+c.home, "E2B_API_KEY="+c.key)
	return cmd
}

// run runs one that has to end with a code.
func (c *cli) run(code int, stdin string, args ...string) stack.Result {
	c.Helper()
	r := s.Run(c.command(args...), []byte(stdin))
	if r.Code != code {
		c.Fatalf("e2b sandbox %s: %d, not %d\n%s%s", strings.Join(args, " "), r.Code, code, r.Stdout, r.Stderr)
	}
	return r
}

// says is run for one that has to write something.
func (c *cli) says(want string, args ...string) {
	c.Helper()
	if r := c.run(0, "", args...); !strings.Contains(r.Stdout, want) {
		c.Errorf("e2b sandbox %s doesn't say %q:\n%s%s", strings.Join(args, " "), want, r.Stdout, r.Stderr)
	}
}

// listed are the ids that it lists, with their state.
func (c *cli) listed(args ...string) map[string]string {
	c.Helper()
	var all []struct{ SandboxID, State string }
	text := c.run(0, "", append([]string{"list", "--format", "json"}, args...)...).Stdout
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		c.Fatalf("%v: %s", err, text)
	}
	states := map[string]string{}
	for _, sb := range all {
		states[sb.SandboxID] = sb.State
	}
	return states
}

// TestCLI has E2B's command line do what it does with sandboxes.
func TestCLI(t *testing.T) {
	c := newCLI(t)
	id := strings.TrimSpace(c.run(0, "", "create", "--detach", "--timeout", "1800").Stdout)
	if got := c.listed(); len(got) != 1 || got[id] != "running" {
		t.Errorf("list has %v, not %s", got, id)
	}
	for _, e := range []struct {
		args           []string
		stdin          string
		code           int
		stdout, stderr string
	}{
		{[]string{id, "sh", "-c", "echo out; echo err >&2; exit 3"}, "", 3, "out\n", "err\n"},
		{[]string{"--user", "root", "--cwd", "/var/tmp", "--env", "A=b c", id, "echo $A $PWD $(id -un)"}, "", 0, "b c /var/tmp root\n", ""},
		{[]string{id, "wc", "-c"}, strings.Repeat("x", 200_000), 0, "200000\n", ""},
	} {
		r := c.run(e.code, e.stdin, append([]string{"exec"}, e.args...)...)
		if r.Stdout != e.stdout || !strings.Contains(r.Stderr, e.stderr) {
			t.Errorf("exec %s: %q, %q", strings.Join(e.args, " "), r.Stdout, r.Stderr)
		}
	}

	c.run(0, "", "exec", id, "echo into the log | sudo tee /proc/1/fd/1")
	var logged struct{ Level, Logger, Message string }
	for _, line := range strings.Split(c.run(0, "", "logs", "--format", "json", id).Stdout, "\n") {
		if strings.Contains(line, "into the log") {
			if err := json.Unmarshal([]byte(line), &logged); err != nil {
				t.Error(err)
			}
		}
	}
	if logged.Message != "into the log" || logged.Logger == "" || logged.Level != "info" {
		t.Errorf("logs has it as %+v", logged)
	}
	c.terminal(id)
	if os.Getenv("CUBE_TEST_LONG") != "" {
		c.rest(id)
	}

	c.says(id, "kill", id)
	if r := c.run(0, "", "kill", id); !strings.Contains(r.Stderr, "wasn't found") {
		t.Errorf("kill again: %s%s", r.Stdout, r.Stderr)
	}
	if r := c.run(1, "", "exec", id, "true"); !strings.Contains(r.Stderr, "SandboxNotFoundError") {
		t.Errorf("exec of what isn't there: %s", r.Stderr)
	}
	if got := c.listed("--state", "running,paused"); len(got) != 0 {
		t.Errorf("list has %v at the end", got)
	}
}

// rest is what the command line has besides for a sandbox.
func (c *cli) rest(id string) {
	c.Helper()
	c.says(id, "list", "--state", "running,paused", "--template", "base", "--order", "desc", "--limit", "5")
	c.says("running", "info", id)
	c.says("into the log", "logs", id)
	c.run(0, "", "pause", id)
	if got := c.listed("--state", "paused"); got[id] != "paused" {
		c.Errorf("list of the paused has %v", got)
	}
	c.run(0, "", "resume", id)
	c.says("CPU", "metrics", id)
}

// terminal connects to a sandbox from a terminal.
func (c *cli) terminal(id string) {
	c.Helper()
	script, err := exec.LookPath("script")
	if err != nil {
		c.Log("without a terminal, as there is no script(1)")
		return
	}
	connect := c.command("connect", "--env", "A=b", id)
	cmd := exec.Command(script, "--quiet", "--return", "--flush", "--command", strings.Join(connect.Args, " "), "/dev/null")
	cmd.Env = connect.Env
	in, err := cmd.StdinPipe()
	if err != nil {
		c.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		c.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		c.Fatal(err)
	}
	defer time.AfterFunc(s.Config.Timeout(time.Minute), func() { _ = cmd.Process.Kill() }).Stop()
	// What is typed before there is somebody to read it is lost.
	var seen bytes.Buffer
	typed := []struct{ after, keys string }{{"$ ", "echo $((6*7))$A\r"}, {"42b", "exit\r"}}
	for b := make([]byte, 4096); ; {
		n, err := out.Read(b)
		seen.Write(b[:n])
		for len(typed) > 0 && bytes.Contains(seen.Bytes(), []byte(typed[0].after)) {
			if _, err := in.Write([]byte(typed[0].keys)); err != nil {
				c.Error(err)
			}
			typed = typed[1:]
		}
		if err != nil {
			break
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) || len(typed) > 0 || !strings.Contains(seen.String(), "Closing terminal connection") {
		c.Errorf("connect: %v, %s", err, &seen)
	}
}
