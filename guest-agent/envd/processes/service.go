package processes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/guest-agent/envd/keepalive"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/status"
)

// Service is process.Process over a registry.
type Service struct {
	*Registry
}

var _ process.ProcessHandler = (*Service)(nil)

func (s *Service) List(_ context.Context, _ *connect.Request[process.ListRequest]) (*connect.Response[process.ListResponse], error) {
	list := &process.ListResponse{}
	for _, p := range s.Registry.List() {
		config := &process.ProcessConfig{Cmd: p.Spec.Command, Args: p.Spec.Args, Envs: p.Spec.Env}
		if p.Spec.HasDir {
			config.Cwd = &p.Spec.Dir
		}
		list.Processes = append(list.Processes, &process.ProcessInfo{Config: config, Pid: p.PID, Tag: p.Spec.Tag})
	}
	return connect.NewResponse(list), nil
}

func (s *Service) Start(ctx context.Context, r *connect.Request[process.StartRequest], out *connect.ServerStream[process.StartResponse]) error {
	interval, err := keepalive.Interval(r.Header())
	if err != nil {
		return status.Connect(err)
	}
	spec, err := s.spec(ctx, r)
	if err != nil {
		return status.Connect(err)
	}
	p, sub, err := s.Registry.Start(spec)
	if err != nil {
		return status.Connect(err)
	}
	defer sub.Leave()
	return status.Connect(follow(ctx, p, sub, interval, func(e *process.ProcessEvent) error {
		return out.Send(&process.StartResponse{Event: e})
	}))
}

func (s *Service) spec(ctx context.Context, r *connect.Request[process.StartRequest]) (Spec, error) {
	c := r.Msg.GetProcess()
	u, err := s.Settings.Caller(r.Header())
	if err != nil {
		return Spec{}, err
	}
	for name, value := range c.GetEnvs() {
		if err := settings.CheckVariable(name, value); err != nil {
			return Spec{}, fmt.Errorf("envs: %w", err)
		}
	}
	spec := Spec{
		User: u, Command: c.GetCmd(), Args: c.GetArgs(), Env: c.GetEnvs(), Dir: c.GetCwd(), HasDir: c != nil && c.Cwd != nil,
		Tag: r.Msg.Tag, NoInput: r.Msg.Stdin != nil && !*r.Msg.Stdin, Log: r.Header().Get(LogHeader) != "", Whole: r.Header().Get(WholeHeader) != "",
	}
	if r.Msg.Pty != nil {
		spec.Size = sizeOf(r.Msg.Pty)
	}
	if deadline, ok := ctx.Deadline(); ok {
		spec.Timeout = max(time.Until(deadline), 1)
	}
	return spec, nil
}

func sizeOf(p *process.PTY) *Size {
	return &Size{Columns: p.GetSize().GetCols(), Rows: p.GetSize().GetRows()}
}

func (s *Service) Connect(ctx context.Context, r *connect.Request[process.ConnectRequest], out *connect.ServerStream[process.ConnectResponse]) error {
	interval, err := keepalive.Interval(r.Header())
	if err != nil {
		return status.Connect(err)
	}
	p, err := s.selected(r.Msg.GetProcess())
	if err != nil {
		return status.Connect(err)
	}
	sub := p.Subscribe()
	defer sub.Leave()
	return status.Connect(follow(ctx, p, sub, interval, func(e *process.ProcessEvent) error {
		return out.Send(&process.ConnectResponse{Event: e})
	}))
}

// follow sends what happens to the process until it ends or ctx does.
func follow(ctx context.Context, p *Process, sub *Subscription, interval time.Duration, send func(*process.ProcessEvent) error) error {
	err := send(&process.ProcessEvent{Event: &process.ProcessEvent_Start_{Start: &process.ProcessEvent_Start{Pid: p.PID}}})
	if err != nil {
		return err
	}
	idle := time.NewTimer(interval)
	defer idle.Stop()
	for {
		var e *process.ProcessEvent
		select {
		case o := <-sub.Output:
			e = data(o)
		case <-idle.C:
			e = &process.ProcessEvent{Event: &process.ProcessEvent_Keepalive{Keepalive: &process.ProcessEvent_KeepAlive{}}}
		case <-p.Done():
			return finish(p, sub, send)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := send(e); err != nil {
			return err
		}
		idle.Reset(interval)
	}
}

// finish sends what is left of a process that is done.
func finish(p *Process, sub *Subscription, send func(*process.ProcessEvent) error) error {
	for len(sub.Output) > 0 {
		if err := send(data(<-sub.Output)); err != nil {
			return err
		}
	}
	select {
	case <-p.Late():
		return fmt.Errorf("process %d was killed as its time was over: %w", p.PID, context.DeadlineExceeded)
	default:
	}
	end := p.End()
	e := &process.ProcessEvent_End{ExitCode: end.Code, Exited: end.Exited, Status: end.Status}
	if end.Err != "" {
		e.Error = &end.Err
	}
	return send(&process.ProcessEvent{Event: &process.ProcessEvent_End_{End: e}})
}

func data(o Output) *process.ProcessEvent {
	d := &process.ProcessEvent_Data{}
	switch o.Stream {
	case Stdout:
		d.Output = &process.ProcessEvent_Data_Stdout{Stdout: o.Bytes}
	case Stderr:
		d.Output = &process.ProcessEvent_Data_Stderr{Stderr: o.Bytes}
	case Terminal:
		d.Output = &process.ProcessEvent_Data_Pty{Pty: o.Bytes}
	}
	return &process.ProcessEvent{Event: &process.ProcessEvent_Data_{Data: d}}
}

func (s *Service) Update(_ context.Context, r *connect.Request[process.UpdateRequest]) (*connect.Response[process.UpdateResponse], error) {
	p, err := s.running(r.Msg.GetProcess())
	if err == nil && r.Msg.Pty != nil {
		err = p.Resize(*sizeOf(r.Msg.Pty))
	}
	return connect.NewResponse(&process.UpdateResponse{}), status.Connect(err)
}

func (s *Service) SendInput(ctx context.Context, r *connect.Request[process.SendInputRequest]) (*connect.Response[process.SendInputResponse], error) {
	p, err := s.running(r.Msg.GetProcess())
	if err == nil {
		err = write(ctx, p, r.Msg.GetInput())
	}
	return connect.NewResponse(&process.SendInputResponse{}), status.Connect(err)
}

func write(ctx context.Context, p *Process, in *process.ProcessInput) error {
	switch in := in.GetInput().(type) {
	case *process.ProcessInput_Stdin:
		return p.Write(ctx, in.Stdin, false)
	case *process.ProcessInput_Pty:
		return p.Write(ctx, in.Pty, true)
	}
	return errdefs.ErrInvalidArgument.WithMessage("input is empty")
}

func (s *Service) StreamInput(ctx context.Context, in *connect.ClientStream[process.StreamInputRequest]) (*connect.Response[process.StreamInputResponse], error) {
	var p *Process
	for in.Receive() {
		var err error
		switch e := in.Msg().GetEvent().(type) {
		case *process.StreamInputRequest_Start_:
			p, err = s.running(e.Start.GetProcess())
		case *process.StreamInputRequest_Data_:
			if p == nil {
				err = errdefs.ErrInvalidArgument.WithMessage("data before start")
			} else {
				err = write(ctx, p, e.Data.GetInput())
			}
		}
		if err != nil {
			return nil, status.Connect(err)
		}
	}
	return connect.NewResponse(&process.StreamInputResponse{}), status.Connect(in.Err())
}

// signals are those that can be sent.
var signals = map[process.Signal]unix.Signal{
	process.Signal_SIGNAL_SIGKILL: unix.SIGKILL,
	process.Signal_SIGNAL_SIGTERM: unix.SIGTERM,
}

func (s *Service) SendSignal(_ context.Context, r *connect.Request[process.SendSignalRequest]) (*connect.Response[process.SendSignalResponse], error) {
	signal, ok := signals[r.Msg.GetSignal()]
	if !ok {
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("signal "+r.Msg.GetSignal().String()+": only SIGNAL_SIGKILL and SIGNAL_SIGTERM can be sent"))
	}
	p, err := s.running(r.Msg.GetProcess())
	if err == nil {
		err = p.Signal(signal)
	}
	return connect.NewResponse(&process.SendSignalResponse{}), status.Connect(err)
}

func (s *Service) CloseStdin(_ context.Context, r *connect.Request[process.CloseStdinRequest]) (*connect.Response[process.CloseStdinResponse], error) {
	p, err := s.running(r.Msg.GetProcess())
	if err == nil {
		err = p.CloseInput()
	}
	return connect.NewResponse(&process.CloseStdinResponse{}), status.Connect(err)
}

// selected finds a process that runs, or that ended a short while ago.
func (s *Service) selected(sel *process.ProcessSelector) (*Process, error) {
	switch sel := sel.GetSelector().(type) {
	case *process.ProcessSelector_Pid:
		return s.Get(sel.Pid)
	case *process.ProcessSelector_Tag:
		return s.Tagged(sel.Tag)
	}
	return nil, errdefs.ErrInvalidArgument.WithMessage("process has neither pid nor tag")
}

// running finds a process that runs.
func (s *Service) running(sel *process.ProcessSelector) (*Process, error) {
	p, err := s.selected(sel)
	if err == nil && p.ended() {
		err = p.gone()
	}
	return p, err
}
