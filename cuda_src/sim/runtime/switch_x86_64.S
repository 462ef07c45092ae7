// cki_sim_switch(void** save, void* load) for x86-64 (System V ABI): pushes the six callee-saved registers, stores the stack
// pointer in *save, takes `load` as the new one and pops. A new fiber's stack is prepared to look like a saved one.
#if defined(__x86_64__)
        .text
        .globl  cki_sim_switch
        .hidden cki_sim_switch
        .type   cki_sim_switch, @function
        .balign 16
cki_sim_switch:
        pushq   %rbp
        pushq   %rbx
        pushq   %r12
        pushq   %r13
        pushq   %r14
        pushq   %r15
        movq    %rsp, (%rdi)
        movq    %rsi, %rsp
        popq    %r15
        popq    %r14
        popq    %r13
        popq    %r12
        popq    %rbx
        popq    %rbp
        ret
        .size   cki_sim_switch, .-cki_sim_switch
        .section .note.GNU-stack, "", @progbits
#endif
