package gate

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
)

const (
	// codeLost is the exit code of a process of which nothing is known, as ssh has it for its own failures.
	codeLost = 255
	// maxEnv bounds how many variables a session may bring.
	maxEnv = 128
	// inputPiece is how much input is in a message, in bytes.
	inputPiece = 32 << 10
	// endTimeout bounds how long the end of a session waits for envd.
	endTimeout = 10 * time.Second
	// Characters that have a terminal send signals, or end the input.
	charInterrupt, charQuit, charEnd = "\x03", "\x1c", "\x04"
)

// SFTP is what a sandbox runs for the sftp subsystem: the program that envd is.
var SFTP = []string{"/.cube/cube-envd", "sftp-server"}

// session is a command or a shell (RFC 4254, 6).
type session struct {
	*gate
	ssh.Channel
	env     map[string]string
	pty     *process.PTY // nil: none
	started bool

	mu      sync.Mutex
	running process.ProcessClient
	pid     uint32 // 0: it doesn't run yet
}

type ptyRequest struct {
	Term                    string
	Columns, Rows, Wide, Hi uint32
	Modes                   string
}

type windowChange struct{ Columns, Rows, Wide, Hi uint32 }

// serve does what the client asks for, one after another.
func (s *session) serve(requests <-chan *ssh.Request) {
	defer func() {
		_ = s.Close()
		ssh.DiscardRequests(requests)
	}()
	s.env = map[string]string{}
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	done := make(chan struct{}) // closed when the process has ended
	for {
		select {
		case r, ok := <-requests:
			if !ok {
				if s.started {
					cancel()
					<-done
				}
				return
			}
			command, good := s.asked(r)
			if r.WantReply {
				_ = r.Reply(good, nil)
			}
			if command != nil && good {
				go func() {
					defer close(done)
					s.run(ctx, command)
				}()
			}
		case <-done:
			return
		}
	}
}

// asked takes a request, and returns what is to be run, if it is for that.
func (s *session) asked(r *ssh.Request) (command []string, good bool) {
	switch r.Type {
	case "env":
		var v struct{ Name, Value string }
		if ssh.Unmarshal(r.Payload, &v) != nil || s.started || len(s.env) >= maxEnv {
			return nil, false
		}
		s.env[v.Name] = v.Value
		return nil, true
	case "pty-req":
		var p ptyRequest
		if ssh.Unmarshal(r.Payload, &p) != nil || s.started {
			return nil, false
		}
		s.pty = size(p.Columns, p.Rows)
		s.env["TERM"] = p.Term
		return nil, true
	case "window-change":
		var w windowChange
		return nil, ssh.Unmarshal(r.Payload, &w) == nil && s.resize(size(w.Columns, w.Rows))
	case "signal":
		var v struct{ Name string }
		return nil, ssh.Unmarshal(r.Payload, &v) == nil && s.signal(v.Name)
	case "shell":
		command = []string{"/bin/bash", "-l"}
	case "exec":
		var v struct{ Command string }
		if ssh.Unmarshal(r.Payload, &v) != nil {
			return nil, false
		}
		command = []string{"/bin/bash", "-c", v.Command}
	case "subsystem":
		var v struct{ Name string }
		if ssh.Unmarshal(r.Payload, &v) != nil || v.Name != "sftp" {
			return nil, false
		}
		command = SFTP
	default:
		return nil, false
	}
	if s.started {
		return nil, false
	}
	s.started = true
	return command, true
}

func size(columns, rows uint32) *process.PTY {
	const most = 1<<16 - 1 // the kernel's
	return &process.PTY{Size: &process.PTY_Size{Cols: min(columns, most), Rows: min(rows, most)}}
}

// run runs a command, with the channel for its stdio, and tells the client how it has ended.
func (s *session) run(ctx context.Context, command []string) {
	end, err := s.follow(ctx, command)
	if err != nil {
		if ctx.Err() == nil {
			_, _ = fmt.Fprintf(s.Stderr(), "cube ssh: %s\r\n", s.to.Explain(err))
		}
		end = &process.ProcessEvent_End{ExitCode: codeLost, Exited: true}
	}
	_ = s.CloseWrite()
	if name := signalName(end); name != "" {
		_, _ = s.SendRequest("exit-signal", false, ssh.Marshal(struct {
			Signal     string
			Core       bool
			Error, Tag string
		}{Signal: name}))
		return
	}
	_, _ = s.SendRequest("exit-status", false, ssh.Marshal(struct{ Code uint32 }{uint32(end.GetExitCode())}))
}

// signalName is the signal that a process was ended by, as SSH names it; "" if it ended by itself.
func signalName(end *process.ProcessEvent_End) string {
	text, ok := strings.CutPrefix(end.GetStatus(), "signal: ")
	if end.GetExited() || !ok {
		return ""
	}
	text = strings.TrimSuffix(text, " (core dumped)")
	for n := unix.Signal(1); n < 32; n++ {
		if n.String() == text {
			return strings.TrimPrefix(unix.SignalName(n), "SIG")
		}
	}
	return "KILL"
}

// follow runs a command to its end. One whose client goes away doesn't stay.
func (s *session) follow(ctx context.Context, command []string) (*process.ProcessEvent_End, error) {
	processes := s.to.Processes(s.user)
	input := true
	events, err := processes.Start(ctx, connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Cmd: command[0], Args: command[1:], Envs: s.env}, Pty: s.pty, Stdin: &input,
	}))
	if err != nil {
		return nil, err
	}
	defer events.Close()
	for events.Receive() {
		e := events.Msg().GetEvent()
		switch {
		case e.GetStart() != nil:
			pid := e.GetStart().GetPid()
			s.mu.Lock()
			s.running, s.pid = processes, pid
			s.mu.Unlock()
			defer s.leave(ctx, processes, pid)
			go s.feed(ctx, processes, pid)
		case e.GetData() != nil:
			if err := s.show(e.GetData()); err != nil {
				return nil, err
			}
		case e.GetEnd() != nil:
			s.mu.Lock()
			s.pid = 0
			s.mu.Unlock()
			return e.GetEnd(), nil
		}
	}
	if err := events.Err(); err != nil {
		return nil, err
	}
	return nil, io.ErrUnexpectedEOF
}

func (s *session) show(d *process.ProcessEvent_Data) error {
	for w, b := range map[io.Writer][]byte{s.Channel: append(d.GetStdout(), d.GetPty()...), s.Stderr(): d.GetStderr()} {
		if len(b) > 0 {
			if _, err := w.Write(b); err != nil {
				return err
			}
		}
	}
	return nil
}

func selector(pid uint32) *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
}

func (s *session) input(b []byte) *process.ProcessInput {
	if s.pty != nil {
		return &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: b}}
	}
	return &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: b}}
}

// feed hands the client's input on, as long as there is any, and then its end.
func (s *session) feed(ctx context.Context, processes process.ProcessClient, pid uint32) {
	stream := processes.StreamInput(ctx)
	send := func(r *process.StreamInputRequest) bool { return stream.Send(r) == nil }
	data := func(b []byte) *process.StreamInputRequest {
		return &process.StreamInputRequest{Event: &process.StreamInputRequest_Data_{Data: &process.StreamInputRequest_Data{Input: s.input(b)}}}
	}
	if !send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Start_{Start: &process.StreamInputRequest_Start{Process: selector(pid)}}}) {
		return
	}
	buf := make([]byte, inputPiece)
	for {
		n, err := s.Read(buf)
		if n > 0 && !send(data(buf[:n])) {
			return // it reads no more
		}
		if err != nil {
			break
		}
	}
	if s.pty != nil {
		send(data([]byte(charEnd)))
	}
	if _, err := stream.CloseAndReceive(); err == nil && s.pty == nil {
		_, _ = processes.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: selector(pid)}))
	}
}

// resize and signal do nothing to a process that doesn't run.
func (s *session) resize(p *process.PTY) bool {
	return s.do(func(ctx context.Context, processes process.ProcessClient, of *process.ProcessSelector) error {
		_, err := processes.Update(ctx, connect.NewRequest(&process.UpdateRequest{Process: of, Pty: p}))
		return err
	})
}

func (s *session) signal(name string) bool {
	key := map[string]string{"INT": charInterrupt, "QUIT": charQuit}[name]
	number := process.Signal(process.Signal_value["SIGNAL_SIG"+name])
	return s.do(func(ctx context.Context, processes process.ProcessClient, of *process.ProcessSelector) error {
		if s.pty != nil && key != "" { // the terminal knows whom it is for
			_, err := processes.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: of, Input: s.input([]byte(key))}))
			return err
		}
		_, err := processes.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: of, Signal: number}))
		return err
	})
}

func (s *session) do(f func(context.Context, process.ProcessClient, *process.ProcessSelector) error) bool {
	s.mu.Lock()
	processes, pid := s.running, s.pid
	s.mu.Unlock()
	if pid == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(s.ctx, endTimeout)
	defer cancel()
	return f(ctx, processes, selector(pid)) == nil
}

// leave ends what still runs when nobody is there for it: a terminal hangs up, which its programs are told by the kernel; a
// command is asked to end.
func (s *session) leave(ctx context.Context, processes process.ProcessClient, pid uint32) {
	s.mu.Lock()
	runs := s.pid != 0
	s.pid = 0
	s.mu.Unlock()
	if !runs {
		return
	}
	signal := process.Signal_SIGNAL_SIGTERM
	if s.pty != nil {
		signal = process.Signal_SIGNAL_SIGKILL // of the shell: interactive ones ignore the other
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	_, _ = processes.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: selector(pid), Signal: signal}))
}
