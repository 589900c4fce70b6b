package processes

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/guest-agent/envd/keepalive"
)

func TestInput(t *testing.T) {
	c, _ := newClient(t)
	r := shell("cat")
	r.Tag = new(string)
	*r.Tag = "the cat"
	s, n := start(t, t.Context(), c, r)
	tagged := &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: "the cat"}}
	stdin := func(text string) *process.ProcessInput {
		return &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte(text)}}
	}
	terminal := &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: []byte("x")}}
	in := c.StreamInput(t.Context())
	must(t, in.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Start_{Start: &process.StreamInputRequest_Start{Process: tagged}}}))
	must(t, in.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Keepalive{}}))
	must(t, in.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Data_{Data: &process.StreamInputRequest_Data{Input: stdin("streamed ")}}}))
	_, err := in.CloseAndReceive()
	must(t, err)
	_, err = c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: tagged, Input: stdin("sent")}))
	must(t, err)
	_, err = c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: tagged, Input: terminal}))
	wantCode(t, "terminal input", err, connect.CodeFailedPrecondition)
	_, err = c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: tagged}))
	wantCode(t, "no input", err, connect.CodeInvalidArgument)
	_, err = c.Update(t.Context(), connect.NewRequest(&process.UpdateRequest{Process: pid(n), Pty: &process.PTY{}}))
	wantCode(t, "resize", err, connect.CodeFailedPrecondition)
	_, err = c.CloseStdin(t.Context(), connect.NewRequest(&process.CloseStdinRequest{Process: pid(n)}))
	must(t, err)
	if out, end := rest(t, s); out != "streamed sent" || end.ExitCode != 0 || end.Error != nil {
		t.Errorf("%q, %v", out, end)
	}
	none := shell("cat; sleep 1000")
	none.Stdin = new(bool)
	_, n = start(t, t.Context(), c, none)
	_, err = c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: pid(n), Input: stdin("x")}))
	wantCode(t, "input of none", err, connect.CodeFailedPrecondition)
	_, err = c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: pid(1 << 30), Input: stdin("x")}))
	wantCode(t, "no process", err, connect.CodeNotFound)
	_, err = c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: pid(n), Signal: 2}))
	wantCode(t, "SIGINT", err, connect.CodeUnimplemented)
}

// Input to a process that doesn't read waits as long as its request.
func TestInputWaits(t *testing.T) {
	c, _ := newClient(t)
	s, n := start(t, t.Context(), c, shell("sleep 1000; true"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	big := &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: make([]byte, 1<<20)}}
	_, err := c.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: pid(n), Input: big}))
	wantCode(t, "input", err, connect.CodeDeadlineExceeded)
	// A process that ends while input waits ends the wait.
	ended := make(chan error)
	go func() {
		_, err := c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: pid(n), Input: big}))
		ended <- err
	}()
	_, err = c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: pid(n), Signal: process.Signal_SIGNAL_SIGTERM}))
	must(t, err)
	rest(t, s)
	if err := <-ended; connect.CodeOf(err) != connect.CodeFailedPrecondition && connect.CodeOf(err) != connect.CodeNotFound {
		t.Error(err)
	}
}

func TestTerminal(t *testing.T) {
	c, _ := newClient(t)
	r := shell("stty size; read a; stty size; tty; echo $a")
	r.Pty = &process.PTY{Size: &process.PTY_Size{Cols: 81, Rows: 25}}
	s, n := start(t, t.Context(), c, r)
	for out := ""; !strings.Contains(out, "25 81"); {
		if !s.Receive() {
			t.Fatalf("%q: %v", out, s.Err())
		}
		out += string(s.Msg().GetEvent().GetData().GetPty())
	}
	_, err := c.Update(t.Context(), connect.NewRequest(&process.UpdateRequest{Process: pid(n), Pty: &process.PTY{Size: &process.PTY_Size{Cols: 100, Rows: 50}}}))
	must(t, err)
	_, err = c.CloseStdin(t.Context(), connect.NewRequest(&process.CloseStdinRequest{Process: pid(n)}))
	wantCode(t, "end of input", err, connect.CodeFailedPrecondition)
	_, err = c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: pid(n), Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{}}}))
	wantCode(t, "stdin", err, connect.CodeFailedPrecondition)
	_, err = c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: pid(n), Input: &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: []byte("typed\n")}}}))
	must(t, err)
	if out, _ := rest(t, s); !strings.Contains(out, "50 100") || !strings.Contains(out, "/dev/pts/") || strings.Count(out, "typed") != 2 {
		t.Errorf("%q", out)
	}
}

func TestKeepAlive(t *testing.T) {
	c, _ := newClient(t)
	r := connect.NewRequest(shell("read a"))
	r.Header().Set(keepalive.Header, "1")
	s, err := c.Start(t.Context(), r)
	must(t, err)
	for s.Receive() {
		if s.Msg().GetEvent().GetKeepalive() != nil {
			s.Close()
			return
		}
	}
	if !errors.Is(s.Err(), io.EOF) {
		t.Error(s.Err())
	}
	t.Error("no keepalive")
}
