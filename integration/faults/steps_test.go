package faults

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/typeurl/v2"
	"github.com/fsnotify/fsnotify"

	"github.com/cubesandbox/cube/orchestrator/stack"
	"github.com/cubesandbox/cube/shim/record"
	vmrecord "github.com/cubesandbox/cube/vmm/record"
)

// step is how far the life of a container has come, as far as it can be told from outside: by what is on the host, by
// events, and by the container's own output.
type step int

const (
	nothing        step = iota
	bundleMade          // by containerd
	shimStarted         // its pid is known
	containerNoted      // the container's record
	podNoted            // the pod's record names the machine
	machineDir          // it exists
	qemuStarted         // its pid is known
	machineThere        // it has been restored
	guestAsked          // the record says that the container may exist
	taskCreate          // event
	taskStart           // event
	running             // the container's own word
	exitNoted           // the record of the exit
	machineGone         // its directory has been removed
	taskExit            // event
	undone              // the container's record says that nothing is left
	taskDelete          // event
	bundleGone          // removed by containerd
)

func (s step) String() string {
	return [...]string{"nothing", "bundle made", "shim started", "container noted", "pod noted", "machine directory", "QEMU started",
		"machine there", "guest asked", "TaskCreate", "TaskStart", "running", "exit noted", "machine gone", "TaskExit", "undone",
		"TaskDelete", "bundle gone"}[s]
}

// life watches one container from outside.
type life struct {
	id       string
	bundle   record.Bundle
	files    *fsnotify.Watcher
	told     chan any // containerd's events of the container
	output   chan struct{}
	furthest step
	started  bool // by its event
	exits    []*events.TaskExit
}

// watch begins to watch a container that doesn't exist yet.
func watch(t *testing.T, id string) *life {
	t.Helper()
	l := &life{
		id:     id,
		bundle: record.Bundle(filepath.Join(bundles(), id)),
		told:   make(chan any, 64),
		output: make(chan struct{}, 1),
	}
	var err error
	if l.files, err = fsnotify.NewWatcher(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.files.Close() })
	for _, dir := range []string{bundles(), s.Config.VMDir()} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			t.Fatal(err)
		}
		if err := l.files.Add(dir); err != nil {
			t.Fatal(err)
		}
	}
	l.listen(t)
	return l
}

// bundles is where the stack's containerd makes them.
func bundles() string {
	return filepath.Join(stack.ContainerdState(s.Config), "io.containerd.runtime.v2.task", s.Config.Containerd.Namespace)
}

// listen takes the container's events, also those of a containerd that comes after this one.
func (l *life) listen(t *testing.T) {
	t.Helper()
	c, err := client.New(s.Config.ContainerdSocket())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(namespaces.WithNamespace(context.Background(), s.Config.Containerd.Namespace))
	t.Cleanup(func() { cancel(); c.Close() })
	go func() {
		for ctx.Err() == nil {
			ch, errs := c.Subscribe(ctx, `topic~="^/tasks/"`)
			for open := true; open; {
				select {
				case e := <-ch:
					if v, err := typeurl.UnmarshalAny(e.Event); err == nil && containerOf(v) == l.id {
						l.told <- v
					}
				case <-errs:
					open = false
					time.Sleep(10 * time.Millisecond) // no event tells when the next containerd listens
				}
			}
		}
	}()
}

func containerOf(event any) string {
	if e, ok := event.(interface{ GetContainerID() string }); ok {
		return e.GetContainerID()
	}
	return ""
}

// await returns when the container has come to a step, or ended says that it won't.
func (l *life) await(target step, ended <-chan struct{}) {
	for l.look(); l.furthest < target; l.look() {
		select {
		case <-l.files.Events:
		case <-l.files.Errors: // too many at once: the look sees what they would have told
		case e := <-l.told:
			l.hear(e)
		case <-l.output:
			l.furthest = max(l.furthest, running)
		case <-ended:
			return
		}
	}
}

// hear takes an event.
func (l *life) hear(event any) {
	switch e := event.(type) {
	case *events.TaskCreate:
		l.furthest = max(l.furthest, taskCreate)
	case *events.TaskStart:
		l.furthest, l.started = max(l.furthest, taskStart), true
	case *events.TaskExit:
		l.furthest = max(l.furthest, taskExit)
		l.exits = append(l.exits, e)
	case *events.TaskDelete:
		l.furthest = max(l.furthest, taskDelete)
	}
}

// catchUp hears the events that have come so far.
func (l *life) catchUp() {
	for {
		select {
		case e := <-l.told:
			l.hear(e)
		default:
			return
		}
	}
}

// look reads what is on the host. What can't be read isn't there yet, or no more.
func (l *life) look() {
	exists := func(path string) bool { _, err := os.Lstat(path); return err == nil }
	at := func(s step, reached bool) {
		if reached {
			l.furthest = max(l.furthest, s)
		}
	}
	_ = l.files.Add(string(l.bundle))
	_ = l.files.Add(filepath.Join(string(l.bundle), "cube"))
	if !exists(string(l.bundle)) {
		at(bundleGone, l.furthest >= bundleMade)
		return
	}
	at(bundleMade, true)
	pod, err := l.bundle.Pod()
	if err != nil {
		return
	}
	_ = l.files.Add(string(pod))
	at(shimStarted, l.shim() != 0)
	state, err := l.bundle.State()
	if err != nil {
		return
	}
	at(containerNoted, true)
	podState, _ := pod.State()
	at(podNoted, podState.MachineDir != "")
	if dir := podState.MachineDir; dir != "" {
		_ = l.files.Add(dir)
		there := exists(dir)
		at(machineDir, there)
		at(qemuStarted, l.qemu() != 0)
		at(machineGone, !there && l.furthest >= exitNoted)
	}
	at(machineThere, podState.PID != 0)
	at(guestAsked, state.Created)
	_, err = l.bundle.Exit()
	at(exitNoted, err == nil)
	at(undone, state.Undone)
}

// shim is the pid of the container's shim, 0 if it isn't known.
func (l *life) shim() int {
	pod, err := l.bundle.Pod()
	if err != nil {
		return 0
	}
	b, _ := os.ReadFile(filepath.Join(string(pod), "shim.pid"))
	return number(b)
}

// qemu is the pid of its machine, 0 if it isn't known.
func (l *life) qemu() int {
	pod, err := l.bundle.Pod()
	if err != nil {
		return 0
	}
	state, err := pod.State()
	if err != nil || state.MachineDir == "" {
		return 0
	}
	vm, err := vmrecord.Read(state.MachineDir)
	if err != nil {
		return 0
	}
	return vm.QEMU.PID
}
