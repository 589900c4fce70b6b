package process

import (
	"context"
	"fmt"
	"os"
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
	if age := time.Since(id.Started()); age < -50*time.Millisecond || age > time.Minute {
		t.Errorf("this process is %v old", age)
	}
	if (ID{}).Alive() {
		t.Fatal("the zero value is no process")
	}
}

func TestFind(t *testing.T) {
	word := fmt.Sprintf("--cube-test-%d", os.Getpid())
	match := func(argv []string) bool { return len(argv) > 0 && argv[len(argv)-1] == word }
	cmd := exec.Command("sh", "-c", "echo; read x", "sh", word)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	id, err := Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	found, err := Find(match)
	if err != nil || len(found) != 1 || found[0].ID != id || found[0].Argv[0] != "sh" {
		t.Errorf("found %+v, %v; want %+v", found, err, id)
	}
	in.Close()
	_ = cmd.Wait()
	if found, err := Find(match); len(found) != 0 || err != nil {
		t.Errorf("after its end: %+v, %v", found, err)
	}
}
