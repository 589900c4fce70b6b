package templates

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/guests"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

const (
	// lastLines is how much is told of what a command has written that has failed.
	lastLines = 20
	// maxShown bounds what is told of a step.
	maxShown = 300
)

// bash is what runs command lines, as E2B's SDKs have it, and sh what can bring it.
const bash, sh = "/bin/bash", "/bin/sh"

// shell is a command line as a process of a shell.
func shell(program, command string) []string { return []string{program, "-l", "-c", command} }

// shell has a step's command line be one of bash, or of what there is before a step has installed that.
func (m *making) shell(ctx context.Context, v *machine, command string) ([]string, error) {
	err := m.Guests.Stat(ctx, v.addr, "root", bash)
	if errdefs.IsNotFound(err) {
		return shell(sh, command), nil
	}
	return shell(bash, command), err
}

// needBash sees that E2B's SDKs can run commands.
func (m *making) needBash(ctx context.Context, v *machine) error {
	err := m.Guests.Stat(ctx, v.addr, "root", bash)
	if errdefs.IsNotFound(err) {
		return errdefs.ErrFailedPrecondition.WithMessage("there is no " + bash + ", by which E2B's SDKs run commands: put it into the image, or install it by a step, for example RUN apk add bash, as root, with one of Alpine's")
	}
	return err
}

// String is the step as a Dockerfile has it, or its beginning.
func (s Step) String() string {
	text := string(s.Type)
	for _, a := range s.Args {
		text += " " + a
	}
	return cut(strings.TrimRight(text, " "))
}

func cut(text string) string {
	if r := []rune(text); len(r) > maxShown {
		return string(r[:maxShown]) + "…"
	}
	return text
}

// do does a step in a machine. The error is a *Failure.
func (m *making) do(ctx context.Context, v *machine, s stage) error {
	var err error
	switch s.Type {
	case Run:
		user := s.Before.User
		if len(s.Args) > 1 && s.Args[1] != "" {
			user = s.Args[1]
		}
		args, err := m.shell(ctx, v, s.Args[0])
		if err != nil {
			return failed(s.Number, err)
		}
		return m.command(ctx, v, s.Number, s.Args[0], guests.Command{Program: args[0], Args: args[1:], User: user, Dir: s.Before.Workdir, Env: s.Before.Env})
	case Copy:
		return m.copy(ctx, v, s)
	case Workdir:
		err = m.Guests.MakeDir(ctx, v.addr, s.Before.User, s.Then.Workdir)
	case User:
		err = m.Guests.Stat(ctx, v.addr, s.Then.User, "/")
	}
	if err != nil {
		return &Failure{Step: s.Number, What: s.String(), Err: err}
	}
	return nil
}

// command runs a command, and tells of what it writes.
func (m *making) command(ctx context.Context, v *machine, step, what string, c guests.Command) error {
	var last []string
	err := m.Guests.Do(ctx, v.addr, c, func(line string, isError bool) {
		if len(last) == lastLines {
			last = last[1:]
		}
		last = append(last, line)
		level := lifecycle.Info
		if isError {
			level = lifecycle.Warn
		}
		m.tell(step, level, line)
	})
	if err != nil {
		return &Failure{Step: step, What: cut(what), Last: last, Err: err}
	}
	return nil
}

// copy has what a client has uploaded be unpacked in the machine. Nothing of it is looked at on the host.
func (m *making) copy(ctx context.Context, v *machine, s stage) error {
	f, err := m.files.Open(ctx, m.Team, s.Files)
	if err != nil {
		if errdefs.IsNotFound(err) {
			err = errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("its files, %s, were not uploaded, or were removed since: build again", s.Files))
			return &Failure{Step: s.Number, What: s.String(), Err: err}
		}
		return err
	}
	defer f.Close()
	from, to, owner, mode := copyArgs(s.Step)
	return m.command(ctx, v, s.Number, s.String(), guests.Command{
		Program: sandbox.Envd, User: "root", Dir: "/", Input: f,
		Args: []string{"unpack", "-user", s.Before.User, "-workdir", s.Before.Workdir, "-owner", owner, "-mode", mode, "--", from, to},
	})
}

// completed gives a machine that has an image's disk what E2B's SDKs need of it and the image lacks.
func (m *making) completed(ctx context.Context, v *machine) error {
	if m.whole {
		return nil
	}
	m.whole = true
	user := m.First.User
	err := m.Guests.Stat(ctx, v.addr, user, bash)
	if err == nil {
		err = m.Guests.Stat(ctx, v.addr, "root", "/tmp")
	}
	lacking := errdefs.IsNotFound(err) || errdefs.IsUnauthorized(err) && user == DefaultUser
	if err != nil && !lacking {
		return err
	}
	if !lacking {
		return m.makeWorkdir(ctx, v)
	}
	m.tell(stepBase, lifecycle.Info, "the image is completed: "+err.Error())
	err = m.command(ctx, v, stepBase, "", guests.Command{Program: sandbox.Envd, User: "root", Dir: "/", Args: []string{"complete", "-user", user}})
	if err == nil {
		err = m.makeWorkdir(ctx, v)
	}
	if err != nil {
		return err
	}
	return m.keep(ctx, v, m.Sum)
}

// makeWorkdir makes the directory that the steps begin in.
func (m *making) makeWorkdir(ctx context.Context, v *machine) error {
	if m.First.Workdir == "" {
		return nil
	}
	return m.Guests.MakeDir(ctx, v.addr, m.First.User, m.First.Workdir)
}
