package process

import (
	"context"
	"os/exec"
	"testing"
	"time"
)

func TestKill(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	id, err := Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	recycled := ID{PID: id.PID, Start: id.Start + 1}
	if err := recycled.Kill(ctx); err != nil || recycled.Alive() || !id.Alive() {
		t.Fatalf("a recycled pid: %v, alive %v, the process alive %v", err, recycled.Alive(), id.Alive())
	}
	if err := id.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if id.Alive() {
		t.Fatal("a zombie is not alive")
	}
	_ = cmd.Wait()
	if id.Alive() {
		t.Fatal("alive after its end")
	}
	if err := id.Kill(ctx); err != nil {
		t.Fatalf("a process that is gone: %v", err)
	}
}

func TestSelf(t *testing.T) {
	id, err := Self()
	if err != nil || !id.Alive() || id.Start == 0 {
		t.Fatal(id, err)
	}
	if (ID{}).Alive() {
		t.Fatal("the zero value is no process")
	}
}
