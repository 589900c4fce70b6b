package share_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/share"
	"github.com/cubesandbox/cube/shim/spec"
)

// ownerEnv makes the test binary a process that starts a helper and is then killed. Its value is the configuration.
const ownerEnv = "CUBE_TEST_SHARE_OWNER"

func owner() int {
	var cfg config.Config
	if err := json.Unmarshal([]byte(os.Getenv(ownerEnv)), &cfg); err != nil {
		fmt.Println(err)
		return 1
	}
	var last share.Record
	_, err := share.Start(context.Background(), share.Config{
		Host: &cfg, ID: "orphan", Dir: cfg.RunDir, Shares: []spec.Share{{Source: cfg.RunDir}}, Log: slog.Default(),
		Record: func(r share.Record) error { last = r; return nil },
	})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	b, err := json.Marshal(last)
	if err != nil {
		return 1
	}
	fmt.Println(string(b))
	select {}
}

// After a kill -9 of the owner the helper ends by itself, and Cleanup frees what it held.
func TestOwnerKilled(t *testing.T) {
	cfg := host(t)
	b, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"="+string(b))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadBytes('\n')
	var held share.Record
	if err := json.Unmarshal(line, &held); err != nil {
		t.Errorf("%s: %v", line, err)
	}
	if !held.Helper.Alive() {
		t.Errorf("%s: the helper isn't alive", line)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for deadline := time.Now().Add(cfg.Timeout(2 * time.Second)); held.Helper.Alive(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error("the helper has outlived its owner")
			break
		}
	}
	for range 2 {
		if err := share.Cleanup(within(t, cfg, 2*time.Second), cfg, held); err != nil {
			t.Fatal(err)
		}
	}
	nothingLeft(t, cfg, held)
}

// Cleanup ends a helper that still runs; a record without anything in it is no helper.
func TestCleanup(t *testing.T) {
	cfg, r := host(t), &recorder{}
	ctx := within(t, cfg, 20*time.Second)
	s, err := share.Start(ctx, configFor(t, cfg, r, spec.Share{Source: t.TempDir()}))
	if err != nil {
		t.Fatal(err)
	}
	if len(r.all) < 2 || r.all[0].UID == 0 || r.all[0].Helper.PID != 0 || r.last().Helper.PID != s.PID() {
		t.Errorf("records %+v", r.all)
	}
	for _, rec := range []share.Record{{}, r.last(), r.last()} {
		if err := share.Cleanup(ctx, cfg, rec); err != nil {
			t.Fatal(err)
		}
	}
	nothingLeft(t, cfg, r.last())
	select {
	case <-s.Done():
	case <-ctx.Done():
		t.Fatal("not done")
	}
	if s.Status() != "signal: killed" {
		t.Error(s.Status())
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// The helper ends when all of its connections have.
func TestConnectionsEnd(t *testing.T) {
	s := start(t, spec.Share{Source: t.TempDir()}, spec.Share{Source: t.TempDir()})
	_ = s.Conns()[0].Close()
	if _, root := connect(t, s.Conns()[1], 0); root == 0 {
		t.Error("no root")
	}
	_ = s.Conns()[1].Close()
	select {
	case <-s.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("it goes on")
	}
	if s.Status() != "exit status 0" {
		t.Error(s.Status())
	}
}
