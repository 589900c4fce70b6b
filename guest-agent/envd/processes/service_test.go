package processes

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/user"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/guest-agent/envd/keepalive"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// waitTime bounds waits for what takes a moment on an idle machine.
const waitTime = 30 * time.Second

// newClient calls a service whose default user is who runs the test, with a home of its own.
func newClient(t *testing.T) (process.ProcessClient, *Registry) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root runs commands as users")
	}
	me, err := user.Current()
	must(t, err)
	home, passwd := t.TempDir(), filepath.Join(t.TempDir(), "passwd")
	must(t, os.WriteFile(passwd, fmt.Appendf(nil, "%s:x:%s:%s::%s:\nother:x:1234:1235::/:\n", me.Username, me.Uid, me.Gid, home), 0o600))
	store := &settings.Store{Users: users.Database{Passwd: passwd, Group: "/nonexistent"}}
	must(t, store.Load(settings.Settings{User: me.Username, Env: map[string]string{"GLOBAL": "g", "BOTH": "global"}}))
	r := &Registry{Settings: store, Environ: []string{"PATH=" + os.Getenv("PATH"), "HOME=/wrong", "BOTH=daemon"}, Log: slog.New(slog.DiscardHandler)}
	mux := http.NewServeMux()
	mux.Handle(process.NewProcessHandler(&Service{Registry: r}))
	s := httptest.NewServer(mux)
	t.Cleanup(func() {
		for _, p := range r.List() {
			_ = p.Signal(unix.SIGKILL)
			<-p.Done()
		}
		s.Close()
	})
	return process.NewProcessClient(s.Client(), s.URL, connect.WithProtoJSON()), r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func shell(script string) *process.StartRequest {
	return &process.StartRequest{Process: &process.ProcessConfig{Cmd: "sh", Args: []string{"-c", script}}}
}

type events = connect.ServerStreamForClient[process.StartResponse]

// start starts a command and returns its stream after the first event, and its number. flags are headers that are set.
func start(t *testing.T, ctx context.Context, c process.ProcessClient, r *process.StartRequest, flags ...string) (*events, uint32) {
	t.Helper()
	req := connect.NewRequest(r)
	for _, name := range flags {
		req.Header().Set(name, "true")
	}
	s, err := c.Start(ctx, req)
	must(t, err)
	if !s.Receive() {
		t.Fatal("no start: ", s.Err())
	}
	return s, s.Msg().GetEvent().GetStart().GetPid()
}

// rest receives what a command writes, up to its end.
func rest(t *testing.T, s *events) (out string, end *process.ProcessEvent_End) {
	t.Helper()
	for s.Receive() {
		e := s.Msg().GetEvent()
		out += string(e.GetData().GetStdout()) + string(e.GetData().GetStderr()) + string(e.GetData().GetPty())
		if e.GetEnd() != nil {
			end = e.GetEnd()
		}
	}
	if end == nil {
		t.Fatalf("no end after %q: %v", out, s.Err())
	}
	return out, end
}

func pid(n uint32) *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: n}}
}

func wantCode(t *testing.T, what string, err error, code connect.Code) {
	t.Helper()
	if connect.CodeOf(err) != code {
		t.Errorf("%s: %v, want %v", what, err, code)
	}
}

func TestStart(t *testing.T) {
	c, _ := newClient(t)
	r := shell(`echo "$GLOBAL $BOTH $MINE $E2B_SANDBOX" "$(pwd)" "$HOME"; exit 3`)
	r.Process.Envs = map[string]string{"MINE": "m"}
	s, _ := start(t, t.Context(), c, r)
	out, end := rest(t, s)
	fields := strings.Fields(out)
	if len(fields) != 6 || strings.Join(fields[:4], " ") != "g global m true" || fields[4] != fields[5] || fields[5] == "/wrong" {
		t.Errorf("%q", out)
	}
	if end.ExitCode != 3 || !end.Exited || end.Status != "exit status 3" || end.GetError() == "" {
		t.Errorf("%v", end)
	}
}

func TestStartRefuses(t *testing.T) {
	c, _ := newClient(t)
	with := func(change func(*connect.Request[process.StartRequest])) error {
		r := connect.NewRequest(shell("true"))
		change(r)
		s, err := c.Start(t.Context(), r)
		must(t, err)
		for s.Receive() {
		}
		return s.Err()
	}
	dir := "/nonexistent"
	file := filepath.Join(t.TempDir(), "not-executable")
	must(t, os.WriteFile(file, nil, 0o600))
	for what, c := range map[string]struct {
		change func(*connect.Request[process.StartRequest])
		code   connect.Code
	}{
		"nothing":      {func(r *connect.Request[process.StartRequest]) { r.Msg.Process = nil }, connect.CodeInvalidArgument},
		"no command":   {func(r *connect.Request[process.StartRequest]) { r.Msg.Process.Cmd = "nonexistent" }, connect.CodeInvalidArgument},
		"no program":   {func(r *connect.Request[process.StartRequest]) { r.Msg.Process.Cmd = file }, connect.CodeInvalidArgument},
		"no directory": {func(r *connect.Request[process.StartRequest]) { r.Msg.Process.Cwd = &dir }, connect.CodeInvalidArgument},
		"zero byte":    {func(r *connect.Request[process.StartRequest]) { r.Msg.Process.Args = []string{"\x00"} }, connect.CodeInvalidArgument},
		"bad variable": {func(r *connect.Request[process.StartRequest]) { r.Msg.Process.Envs = map[string]string{"A=": ""} }, connect.CodeInvalidArgument},
		"huge terminal": {func(r *connect.Request[process.StartRequest]) {
			r.Msg.Pty = &process.PTY{Size: &process.PTY_Size{Cols: 1 << 16}}
		}, connect.CodeInvalidArgument},
		"no keepalive": {func(r *connect.Request[process.StartRequest]) { r.Header().Set(keepalive.Header, "0") }, connect.CodeInvalidArgument},
		"no user":      {func(r *connect.Request[process.StartRequest]) { r.Header().Set("Authorization", "Basic bm9uZTo=") }, connect.CodeUnauthenticated},
		"no basic":     {func(r *connect.Request[process.StartRequest]) { r.Header().Set("Authorization", "Bearer x") }, connect.CodeUnauthenticated},
	} {
		wantCode(t, what, with(c.change), c.code)
	}
}

func TestOtherUser(t *testing.T) {
	c, _ := newClient(t)
	r := connect.NewRequest(shell("id -u; id -g; id -G"))
	r.Header().Set("Authorization", "Basic b3RoZXI6") // other:
	s, err := c.Start(t.Context(), r)
	must(t, err)
	if out, _ := rest(t, s); out != "1234\n1235\n1235\n" {
		t.Errorf("%q", out)
	}
}

// The time of a request is the command's, also for a client that has gone.
func TestDeadline(t *testing.T) {
	c, reg := newClient(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	s, n := start(t, ctx, c, shell("sleep 1000; true"))
	p, err := reg.Get(n)
	must(t, err)
	s.Close()
	select {
	case <-p.Done():
	case <-time.After(waitTime):
		t.Fatal("the command outlives its time")
	}
	if p.End().Status != "signal: killed" {
		t.Errorf("%+v", p.End())
	}
	// Who asks for it hears why.
	again, err := c.Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: pid(n)}))
	must(t, err)
	for again.Receive() {
	}
	wantCode(t, "connect", again.Err(), connect.CodeDeadlineExceeded)
}

func TestClientLeaves(t *testing.T) {
	c, reg := newClient(t)
	ctx, cancel := context.WithCancel(t.Context())
	s, n := start(t, ctx, c, shell("read a; head -c 1000000 /dev/zero; read b; echo $a$b"))
	cancel()
	s.Close()
	input := func(text string) {
		_, err := c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{
			Process: pid(n), Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte(text)}},
		}))
		must(t, err)
	}
	input("x\n")
	p, err := reg.Get(n)
	must(t, err)
	sub := p.Subscribe()
	defer sub.Leave()
	input("y\n")
	var last string
	for done := false; !done; {
		select {
		case o := <-sub.Output:
			last = string(o.Bytes)
		case <-p.Done():
			done = true
		}
	}
	for len(sub.Output) > 0 {
		last = string((<-sub.Output).Bytes)
	}
	if !strings.HasSuffix(last, "xy\n") {
		t.Errorf("%.20q…", last)
	}
	// It can still be asked for its end, but isn't listed, and has no input.
	again, err := c.Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: pid(n)}))
	must(t, err)
	var kinds []string
	for again.Receive() {
		kinds = append(kinds, fmt.Sprintf("%T", again.Msg().GetEvent().GetEvent()))
	}
	if strings.Join(kinds, " ") != "*process.ProcessEvent_Start_ *process.ProcessEvent_End_" || again.Err() != nil {
		t.Error(kinds, again.Err())
	}
	list, err := c.List(t.Context(), connect.NewRequest(&process.ListRequest{}))
	if must(t, err); len(list.Msg.Processes) != 0 {
		t.Error(list.Msg.Processes)
	}
	_, err = c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: pid(n), Signal: process.Signal_SIGNAL_SIGKILL}))
	wantCode(t, "signal", err, connect.CodeNotFound)
}

// A client that doesn't read holds the command up, and doesn't fill the memory.
func TestSlowReader(t *testing.T) {
	_, reg := newClient(t)
	me, err := reg.Settings.Named("")
	must(t, err)
	p, sub, err := reg.Start(Spec{User: me, Command: "sh", Args: []string{"-c", "head -c 100000000 /dev/zero; echo end"}})
	must(t, err)
	for len(sub.Output) < cap(sub.Output) {
		time.Sleep(time.Millisecond)
	}
	select {
	case <-p.Done():
		t.Fatal("the command didn't wait")
	default:
	}
	sub.Leave()
	select {
	case <-p.Done():
	case <-time.After(waitTime):
		t.Fatal("the command waits for a client that has left")
	}
}

// A client that doesn't read doesn't keep a command that is killed from having ended.
func TestKillWithSlowReader(t *testing.T) {
	_, reg := newClient(t)
	me, err := reg.Settings.Named("")
	must(t, err)
	p, sub, err := reg.Start(Spec{User: me, Command: "cat", Args: []string{"/dev/zero"}})
	must(t, err)
	defer sub.Leave()
	for len(sub.Output) < cap(sub.Output) {
		time.Sleep(time.Millisecond)
	}
	must(t, p.Signal(unix.SIGKILL))
	select {
	case <-p.Done():
	case <-time.After(waitTime):
		t.Fatal("a command that was killed waits for a client that doesn't read")
	}
}

func TestKillEndsTheGroup(t *testing.T) {
	c, _ := newClient(t)
	// The child keeps the output open.
	s, n := start(t, t.Context(), c, shell("sleep 1000 & echo $!; wait"))
	if !s.Receive() {
		t.Fatal(s.Err())
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(s.Msg().GetEvent().GetData().GetStdout())))
	must(t, err)
	there, err := unix.PidfdOpen(child, 0)
	must(t, err)
	defer unix.Close(there)
	_, err = c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: pid(n), Signal: process.Signal_SIGNAL_SIGKILL}))
	must(t, err)
	if _, end := rest(t, s); end.Exited || end.ExitCode != -1 || end.Status != "signal: killed" {
		t.Errorf("%v", end)
	}
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(there), Events: unix.POLLIN}}, int(waitTime.Milliseconds())); n != 1 {
		t.Error("the child is there: ", err)
	}
}

// A daemon that left the group isn't killed with it, and doesn't keep the command from having ended.
func TestKillCutsOutput(t *testing.T) {
	c, _ := newClient(t)
	s, n := start(t, t.Context(), c, shell("echo before; setsid sleep 1000 & echo $!; wait"))
	out := ""
	for strings.Count(out, "\n") < 2 && s.Receive() {
		out += string(s.Msg().GetEvent().GetData().GetStdout())
	}
	daemon, err := strconv.Atoi(strings.Fields(out)[1])
	must(t, err)
	defer unix.Kill(daemon, unix.SIGKILL)
	// It isn't known when it has its own session: only then it stays.
	for deadline := time.Now().Add(waitTime); ; {
		if sid, err := unix.Getsid(daemon); err == nil && sid == daemon || time.Now().After(deadline) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	_, err = c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: pid(n), Signal: process.Signal_SIGNAL_SIGKILL}))
	must(t, err)
	rest(t, s)
	if err := unix.Kill(daemon, 0); err != nil {
		t.Error("the daemon:", err)
	}
}

// Commands that run take no threads.
func TestThreads(t *testing.T) {
	_, reg := newClient(t)
	me, err := reg.Settings.Named("")
	must(t, err)
	threads := pprof.Lookup("threadcreate")
	before := threads.Count()
	for range 100 {
		_, sub, err := reg.Start(Spec{User: me, Command: "sleep", Args: []string{"1000"}})
		must(t, err)
		sub.Leave()
	}
	if n := threads.Count() - before; n > 50 {
		t.Errorf("100 commands have %d threads", n)
	}
}
