package templates

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// finish starts the machine that sandboxes go on from, with the disk that the steps have come to and nothing of theirs in memory,
// saves it and proves what was saved.
func (m *making) finish(ctx context.Context, snapshot string) (Made, error) {
	settings, err := m.final(ctx, snapshot)
	if errors.Is(err, errBeginAgain) {
		settings, err = m.final(ctx, snapshot)
	}
	if err != nil {
		return Made{}, failed(stepFinal, err)
	}
	settings.Digest, settings.Builder = m.Digest, m.Version
	settings.Inputs = digest(m.inputs(), m.last().Env, m.Run, m.Ready, m.Start, m.Hook, m.CPUs, m.MemoryMB, m.Profile)
	return Made{Settings: settings, DiskMB: m.DiskMB, Digest: settings.Digest, Builder: settings.Builder, Inputs: settings.Inputs}, nil
}

// errBeginAgain: the machine began before the image was complete.
var errBeginAgain = errors.New("the image was completed after its machine had begun")

func (m *making) final(ctx context.Context, snapshot string) (s db.Settings, err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	at := m.last()
	var command []string
	if m.Run != "" {
		command = shell(bash, m.Run)
		m.tell(stepFinal, lifecycle.Info, "start "+cut(m.Run))
	}
	step := stepFinal
	if m.disk == "" {
		step = stepBase
	}
	v, err := m.begin(ctx, &u, at, command...)
	if err == nil && !m.whole {
		if err = m.completed(ctx, v); err == nil && m.disk != "" && m.Run != "" {
			return s, errBeginAgain
		}
	}
	if err == nil {
		err = m.needBash(ctx, v)
	}
	if err != nil {
		return s, failed(step, err)
	}
	s = db.Settings{User: at.User, Workdir: at.Workdir, Hook: m.Hook, Run: m.Run, Ready: m.Ready, Start: m.Start, Profile: string(m.Profile), Container: v.container}
	if err := m.introduce(ctx, v.addr, lifecycle.Init{User: s.User, Workdir: s.Workdir}); err != nil {
		return s, err
	}
	if s.EnvdVersion, err = m.Guests.Version(ctx, v.addr); err != nil {
		return s, err
	}
	if err := m.await(ctx, v.id, v.addr); err != nil {
		return s, err
	}
	if err := m.save(ctx, v, snapshot); err != nil {
		return s, err
	}
	if err := m.prove(ctx, snapshot, s); err != nil {
		return s, errors.Join(err, m.forget(ctx, snapshot))
	}
	return s, nil
}

// save saves the machine, which isn't needed any more then.
func (m *making) save(ctx context.Context, v *machine, snapshot string) error {
	began := time.Now()
	err := m.Machines.Save(ctx, v.id, snapshot)
	if err == nil {
		if err = v.remove(); err != nil {
			err = errors.Join(err, m.forget(ctx, snapshot))
		}
	}
	m.tell(stepFinal, lifecycle.Debug, fmt.Sprintf("saved in %.1f s", time.Since(began).Seconds()))
	return err
}

// forget undoes save, also when ctx has ended.
func (m *making) forget(ctx context.Context, snapshot string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.Config.Timeout(undoTimeout))
	defer cancel()
	return m.Machines.Forget(ctx, snapshot)
}

// await waits until what runs in a machine is ready: it says so itself, and serves the hook.
func (m *making) await(ctx context.Context, id string, addr netip.Addr) error {
	limit := m.Config.Timeout(time.Duration(m.Config.Templates.ReadyTimeout))
	rctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	fail := func(why string, err error) error {
		last, also := m.said(ctx, id)
		return &Failure{Step: stepFinal, What: cut(m.Run), Last: last, Ready: err.Error(), Err: errors.Join(errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("%s within %s", why, limit)), also)}
	}
	if m.Ready != "" {
		m.tell(stepFinal, lifecycle.Info, "wait for "+cut(m.Ready))
		if err := m.Guests.Until(rctx, addr, m.Ready); err != nil {
			return fail("what runs in it wasn't ready by "+cut(m.Ready), err)
		}
	}
	if m.Hook != nil {
		if err := m.Guests.Listens(rctx, addr, m.Hook.Port); err != nil {
			return fail(fmt.Sprintf("nothing that runs in it has listened on port %d of the init hook", m.Hook.Port), err)
		}
	}
	return nil
}

// said is the last lines that a machine has written.
func (m *making) said(ctx context.Context, id string) ([]string, error) {
	entries, err := m.Machines.Log(ctx, id, lifecycle.LogQuery{Backward: true, Limit: lastLines})
	if err != nil {
		return nil, fmt.Errorf("its output can't be read: %w", err)
	}
	var lines []string
	for _, e := range slices.Backward(entries) {
		lines = append(lines, e.Message)
	}
	return lines, nil
}

// check is a command line that succeeds where the name server that the sandbox has been given answers, whatever it says, and
// takes a connection. It needs nothing but bash.
const check = `
while read -r key server _; do [ "$key" != nameserver ] || break; done </etc/resolv.conf
# A query of the root's name servers: id 1, recursion desired, one question, no name, type NS, class IN.
exec 3<>"/dev/udp/$server/53" || exit
got=
for n in 1 2 3; do
	printf '\0\1\1\0\0\1\0\0\0\0\0\0\0\0\2\0\1' >&3
	# The answer's first byte is a zero, as the query's.
	if read -r -d '' -n 1 -t 5 -u 3 _; then got=1; break; fi
done
[ "$got" ] || { echo "the name server $server doesn't answer"; exit 1; }
exec 4<>"/dev/tcp/$server/53" || { echo "no TCP connection to $server"; exit 1; }
`

// prove makes a sandbox of the snapshot and uses it.
func (m *making) prove(ctx context.Context, snapshot string, s db.Settings) (err error) {
	began := time.Now()
	id := machinePrefix + uuid.NewString()
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	u.Push(m.remover(ctx, id))
	addr, err := m.Machines.Create(ctx, lifecycle.Machine{ID: id, Team: m.Team, Snapshot: snapshot, Container: s.Container})
	if err != nil {
		return fmt.Errorf("no sandbox can be made of it: %w", err)
	}
	if err := m.introduce(ctx, addr, lifecycle.Init{User: s.User, Workdir: s.Workdir}); err != nil {
		return fmt.Errorf("a sandbox that was made of it: %w", err)
	}
	nctx, cancel := context.WithTimeout(ctx, m.Config.Timeout(checkTimeout))
	defer cancel()
	if _, err := m.Guests.Run(nctx, addr, "", check); err != nil {
		return fmt.Errorf("a sandbox that was made of it can't use the network: %w", err)
	}
	if err := m.await(ctx, id, addr); err != nil {
		var f *Failure
		if errors.As(err, &f) {
			f.Err = fmt.Errorf("a sandbox that was made of it: %w", f.Err)
		}
		return err
	}
	m.tell(stepFinal, lifecycle.Debug, fmt.Sprintf("proved in %.1f s", time.Since(began).Seconds()))
	return nil
}
